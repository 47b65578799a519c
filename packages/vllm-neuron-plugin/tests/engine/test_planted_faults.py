# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy run`` names faults planted in an engine, where they are, and finds none where there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FAULTS = Path(__file__).parents[1] / "faults"
LAYERS = 3
PROGRAM = "from neuron_accuracy.cli.main import main; main()"


@dataclass(frozen=True)
class Planted:
    """A fault, what an engine needs for it to show, and what is to be found: level, kind, and part of the place."""

    name: str
    level: str
    kind: str
    where: str
    detail: str
    dtype: str = "float32"
    ranks: int = 1
    settings: tuple[str, ...] = ()


PLANTED = [
    Planted(
        "weight_row", "tensor", "diverges", "model.layers.1.mlp.down_proj:output.0, only channel 5", "1.02"
    ),
    Planted(
        "rope_base",
        "kv",
        "rotary",
        "keys of",
        "keys from layer 0 on diverge with position, position 0 agrees",
    ),
    Planted(
        "swapped_kv_heads", "kv", "swapped heads", "layer 0", "holds what the reference has in head", ranks=2
    ),
    Planted("overwritten_block", "kv", "overwritten", "positions 16-31, all layers", "a cached one"),
    Planted("padded_slot", "tensor", "diverges", "model.layers.0.self_attn", "it lies between them"),
    Planted(
        "fp8_scale",
        "kv",
        "gain",
        "keys of layer 0",
        "gain 0.50",
        "bfloat16",
        settings=("kv_cache_dtype=fp8",),
    ),
    Planted("ignored_top_p", "sampling", "top_p ignored", "prompt", "top_p=0.5 lie outside"),
    Planted(
        "narrow_sum",
        "tensor",
        "loses precision",
        "model.layers.1.self_attn.o_proj:output.0",
        "it adds up in too few bits",
        "bfloat16",
    ),
]
BY_DEFAULT = ("overwritten_block",)

Models = dict[str, Path]


@pytest.fixture(scope="session")
def three_layers(
    tmp_path_factory: pytest.TempPathFactory, write_models: tuple[Callable[..., Path], Callable[..., Path]]
) -> Models:
    """Random models that have a layer before the faulty one and one behind it."""
    write_llama, write_qwen3 = write_models
    root = tmp_path_factory.mktemp("three-layers")
    return {
        "llama": write_llama(root / "llama", num_hidden_layers=LAYERS),
        "qwen3": write_qwen3(root / "qwen3", num_hidden_layers=LAYERS),
    }


@pytest.fixture
def run(tmp_path: Path, graph_cache: Path) -> Callable[..., dict[str, Any]]:
    """``run(model, fault, …)``: the command in a process of its own; its outcome, and its exit code as ``code``."""

    def run(
        model: Path,
        fault: str = "",
        *,
        dtype: str = "float32",
        ranks: int = 1,
        settings: tuple[str, ...] = (),
        prompts: Path | None = None,
    ) -> dict[str, Any]:
        cache = tmp_path / "cache"
        cache.mkdir(exist_ok=True)
        if not (cache / "kernels").exists() and (graph_cache / "kernels").exists():
            (cache / "kernels").symlink_to(graph_cache / "kernels")
        options = {
            "dtype": dtype,
            "tensor_parallel_size": str(ranks),
            "max_model_len": "128",
            "max_num_seqs": "4",
            "num_gpu_blocks_override": "64",
            "additional_config": '{"neuron_config": {"compiler": "fx"}}',
            **dict(setting.split("=") for setting in settings),
        }
        given = [word for item in options.items() for word in ("--option", "test." + "=".join(item))]
        found = tmp_path / "outcome.json"
        found.unlink(missing_ok=True)
        command = ["run", "--test", f"vllm-neuron:{model}", *given, "--tokens", "8", "--json", str(found)]
        chosen = ["--num-prompts", "4"] if prompts is None else ["--prompts", str(prompts)]
        environment = {
            **os.environ,
            "PLANTED_FAULT": fault,
            "PYTHONPATH": str(FAULTS),
            "VLLM_NEURON_CACHE_DIR": str(cache),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if ranks == 1 else "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "HF_HUB_OFFLINE": "1",
        }
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, *command, *chosen, "--out", str(tmp_path / "out")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert found.exists(), ran.stdout[-3000:] + ran.stderr[-5000:]
        outcome: dict[str, Any] = json.loads(found.read_text())
        return {**outcome, "code": ran.returncode}

    return run


def cases() -> list[Any]:
    return [
        pytest.param(
            fault,
            model,
            id=f"{fault.name}-{model}",
            marks=() if model == "llama" and fault.name in BY_DEFAULT else pytest.mark.nightly,
        )
        for fault in PLANTED
        for model in ("llama", "qwen3")
    ]


@pytest.mark.supports("planted faults found", model="llama")
@pytest.mark.supports("planted faults found", model="qwen3")
@pytest.mark.parametrize(("fault", "model"), cases())
def test_a_planted_fault_is_named_where_it_is(run, three_layers, fault, model):
    outcome = run(
        three_layers[model], fault.name, dtype=fault.dtype, ranks=fault.ranks, settings=fault.settings
    )
    assert outcome["code"] == 1
    assert not outcome["passed"]
    first = outcome["findings"][0]
    assert (first["level"], first["kind"]) == (fault.level, fault.kind), first
    assert fault.where in first["where"], first
    assert fault.detail in first["detail"], first
    assert outcome["data"]["first"] == {"where": first["where"], "kind": first["kind"]}


def clean_runs() -> list[Any]:
    """Ten runs without a fault: other prompts, orders, dtypes, caches, models and numbers of ranks."""
    runs = [
        ("llama", "float32", 1, (), 0),
        ("llama", "float32", 2, (), 1),
        ("llama", "bfloat16", 1, (), 2),
        ("llama", "bfloat16", 1, ("kv_cache_dtype=fp8",), 3),
        ("llama", "float32", 1, ("async_scheduling=true", "max_num_seqs=2"), 4),
        ("qwen3", "float32", 1, (), 5),
        ("qwen3", "float32", 2, (), 6),
        ("qwen3", "bfloat16", 1, (), 7),
        ("qwen3", "bfloat16", 2, (), 8),
        ("qwen3", "bfloat16", 1, ("kv_cache_dtype=fp8",), 9),
    ]
    return [pytest.param(*run, id=f"{run[0]}-{run[4]}") for run in runs]


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "dtype", "ranks", "settings", "seed"), clean_runs())
def test_a_clean_run_gives_no_alarm(run, three_layers, tmp_path, model, dtype, ranks, settings, seed):
    import numpy as np

    rng = np.random.default_rng(seed)
    prompts = [{"token_ids": rng.integers(3, 256, rng.integers(1, 60)).tolist()} for _ in range(5)]
    rng.shuffle(prompts)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    outcome = run(three_layers[model], dtype=dtype, ranks=ranks, settings=settings, prompts=file)
    assert outcome["code"] == 0, [f for f in outcome["findings"] if f["severity"] == "fault"]
    assert outcome["passed"]
    done = {row["level"]: row["verdict"] for row in outcome["data"]["levels"]}
    assert done == {"task": "left out"} | dict.fromkeys(("prompt", "sampling", "kv", "tensor"), "passed")
    assert (tmp_path / "out" / "report.html").stat().st_size > 100_000
