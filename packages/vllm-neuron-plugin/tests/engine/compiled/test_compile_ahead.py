# SPDX-License-Identifier: Apache-2.0
"""``neuron compile`` fills a store that a server starts from without compiling, and says what it cannot do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

LIMITS = [
    "--max-model-len",
    "128",
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    "128",
    "--dtype",
    "float32",
]
BUCKETS = {"neuron_config": {"prefill_buckets": [128], "decode_buckets": [4]}}
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], max_model_len=128, max_num_seqs=int(sys.argv[2]), max_num_batched_tokens=128,
              dtype="float32", num_gpu_blocks_override=40, additional_config=json.loads(sys.argv[3]))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    builder = worker.runner.executor.builder
    stats, counters = builder.stats, builder.cache.counters
    facts = {"captured": stats.captured, "compiled": stats.compiled, "loaded": stats.loaded,
             "hits": counters.hits, "misses": counters.misses, "tokens": list(out[0].outputs[0].token_ids)}
    print("FACTS " + json.dumps(facts))
"""


def run(*command: object, **environ: str) -> subprocess.CompletedProcess[str]:
    base = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "COLUMNS": "140"}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, **base, **environ},
    )


def compile_model(
    model: Path, output: Path, *arguments: object, **environ: str
) -> subprocess.CompletedProcess[str]:
    options = ["--target", "cpu", "--output", output, *LIMITS, "--additional-config", json.dumps(BUCKETS)]
    return run(sys.executable, "-m", "neuron_core.cli", "compile", model, *options, *arguments, **environ)


def serve(model: Path, max_num_seqs: int = 4, config: object = BUCKETS, **environ: str):
    done = run(sys.executable, "-c", SERVE, model, max_num_seqs, json.dumps(config), **environ)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    return json.loads(lines[0].removeprefix("FACTS ")) if lines else done


def copy_tools(graph_cache: Path, store: Path) -> None:
    """The kernels and the precompiled header of this machine, which are no part of what is tested."""
    for name in ("kernels", "toolchain"):
        if (graph_cache / name).exists():
            shutil.copytree(graph_cache / name, store / name)


@pytest.fixture(scope="module")
def compiled(
    tiny_llama: Path, graph_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict]:
    """A store for four sequences of 128 tokens, made from the configuration alone, and what was printed."""
    root = tmp_path_factory.mktemp("ahead")
    copy_tools(graph_cache, root / "store")
    (root / "model").mkdir()
    shutil.copy(tiny_llama / "config.json", root / "model")
    done = compile_model(root / "model", root / "store", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "store", json.loads(done.stdout)


def test_every_bucket_is_reported(compiled):
    report = compiled[1]
    assert report["complete"]
    assert [bucket["bucket"] for bucket in report["buckets"]] == ["prefill_s128", "logits_s64", "decode_b4"]
    assert {bucket["status"] for bucket in report["buckets"]} == {"compiled"}


@pytest.mark.supports("ahead-of-time compilation", model="llama")
def test_n1_a_server_on_a_copy_of_the_store_compiles_and_captures_nothing(compiled, tiny_llama, tmp_path):
    store, report = compiled
    copy = shutil.copytree(store, tmp_path / "volume")
    facts = serve(tiny_llama, VLLM_NEURON_CACHE_DIR=str(copy), VLLM_NEURON_REQUIRE_COMPILED="1")
    graphs = sum(bucket["compiled"] for bucket in report["buckets"])
    expected = {"captured": 0, "compiled": 0, "loaded": graphs, "hits": graphs, "misses": 0}
    assert {name: facts[name] for name in expected} == expected


def test_t14_more_sequences_than_were_compiled_for_are_refused_with_both_numbers(compiled, tiny_llama):
    settings = {"VLLM_NEURON_CACHE_DIR": str(compiled[0]), "VLLM_NEURON_REQUIRE_COMPILED": "1"}
    eight = {"neuron_config": {"prefill_buckets": [128], "decode_buckets": [8]}}
    failed = serve(tiny_llama, 8, eight, **settings)
    assert failed.returncode != 0
    assert "max_num_seqs=8" in failed.stderr and "compiled for max_num_seqs=4" in failed.stderr


def test_a_missing_bucket_is_named_when_nothing_may_be_compiled(tiny_llama, tmp_path, graph_cache):
    copy_tools(graph_cache, tmp_path)
    failed = serve(tiny_llama, VLLM_NEURON_CACHE_DIR=str(tmp_path), VLLM_NEURON_REQUIRE_COMPILED="1")
    assert failed.returncode != 0
    assert "bucket prefill_s128 is not in the compile cache" in failed.stderr


def test_a_second_compile_finds_everything_and_prints_a_table(compiled, tiny_llama):
    done = compile_model(tiny_llama, compiled[0])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if "prefill_s128" in line or "decode_b4" in line]
    assert len(rows) == 2 and all("in cache" in row for row in rows)
    assert "VLLM_NEURON_REQUIRE_COMPILED=1" in done.stdout


def test_a_server_asked_to_compile_alone_compiles_and_ends(compiled, tiny_llama):
    options = [*LIMITS, "--additional-config", json.dumps(BUCKETS)]
    done = run(
        Path(sys.executable).with_name("vllm"),
        *("serve", tiny_llama, *options),
        VLLM_NEURON_CPU_COMPILE="1",
        NEURON_PLATFORM_TARGET_OVERRIDE="cpu",
        VLLM_NEURON_CACHE_DIR=str(compiled[0]),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "in cache" in done.stdout


def test_a_chip_without_its_compiler_keeps_the_captured_graphs_and_names_the_wheels(tiny_llama, tmp_path):
    done = compile_model(tiny_llama, tmp_path, "--target", "trn2", "--tensor-parallel-size", "2")
    assert done.returncode == 1, done.stderr[-3000:]
    assert "neuronx-cc" in done.stdout and "captured" in done.stdout
    layers = sorted((tmp_path / "captured" / "trn2").glob("*/layer.0/graph.py"))
    assert [path.parts[-3] for path in layers] == ["decode_b4", "prefill_s128"]
    assert "all_reduce" in layers[0].read_text()


REFUSED = [
    (["--target", "trn9"], "trn9"),
    (["--lnc", "2"], "--lnc=2: says nothing about the CPU"),
    (["--target", "trn2", "--cpu-threads", "2"], "--cpu-threads=2: says nothing about trn2"),
    (["--max-modle-len", "128"], "not ones that vllm serve takes"),
    (["--tensor-parallel-size", "3"], "attention heads (4) must be divisible"),
]


@pytest.mark.parametrize(
    "refused", [REFUSED[:2], pytest.param(REFUSED[2:], marks=pytest.mark.nightly)], ids=["first", "others"]
)
def test_an_option_that_cannot_work_is_named(tiny_llama, tmp_path, refused):
    with ThreadPoolExecutor(2) as pool:  # a process takes seconds to import vLLM
        failed = pool.map(lambda one: compile_model(tiny_llama, tmp_path, *one[0]), refused)
        for (arguments, message), done in zip(refused, failed, strict=True):
            assert done.returncode in (1, 2) and message in done.stderr, arguments
