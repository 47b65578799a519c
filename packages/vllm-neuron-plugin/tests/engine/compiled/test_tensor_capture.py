# SPDX-License-Identifier: Apache-2.0
"""Captures of an engine: what is written is what the graphs computed, and nothing else changes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.errors import CaptureError
from neuron_core.errors import ConfigError
from neuron_core.graphs.model_programs import ModelPrograms

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 24,
}
PROMPTS = [[3 + (7 * i) % 250 for i in range(length)] for length in (70, 5, 33, 1, 90)]


def settings(compiler: str = "fx", **neuron_config: Any) -> dict[str, Any]:
    section = {"prefill_buckets": [64], "decode_buckets": [4], "compiler": compiler, **neuron_config}
    return {**LIMITS, "additional_config": {"neuron_config": section}}


def greedy(count: int = 8) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "capture"


def heard_eagerly(model: nn.Module, run: Callable[[], object]) -> dict[tuple[str, str], Tensor]:
    """What torch's own hooks hear of modules while ``run`` runs."""
    heard: dict[tuple[str, str], Tensor] = {}

    def listen(name: str) -> Any:
        def hook(_: nn.Module, args: Any, result: Any) -> None:
            for i, tensor in enumerate(result if isinstance(result, tuple) else (result,)):
                heard[name, f"output.{i}"] = tensor.clone()

        return hook

    handles = [module.register_forward_hook(listen(name)) for name, module in model.named_modules()]
    run()
    for handle in handles:
        handle.remove()
    return heard


@pytest.mark.supports("tensor capture", model="llama")
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_a_capture_is_what_the_model_computes_eagerly_bit_for_bit(
    engines, tiny_llama, folder, overlap, monkeypatch
):
    """Every step is run once more without a graph, on the same inputs and the same cache."""
    capture = {"folder": str(folder), "modules": ["**"], "kv": True}
    engine = engines(tiny_llama, **settings(tensor_capture=capture), async_scheduling=overlap)
    executor = engine.runner.executor
    model, run = executor.model, executor.run
    eager: list[dict[tuple[str, str], Tensor]] = []

    def twice(bucket: Any, variant: str, values: Mapping[str, Tensor], watch: Any = None) -> Any:
        program = ModelPrograms(model, executor.plan, len(executor.kv_tensors[0])).program(bucket, variant)
        given = {name: tensor.clone() for name, tensor in {**executor._kept, **values}.items()}
        with torch.no_grad():
            eager.append(heard_eagerly(model, lambda: program.run_eager(given)))
        return run(bucket, variant, values, watch)

    monkeypatch.setattr(executor, "run", twice)
    engine.run(PROMPTS, greedy(), arrive=2)
    engine.llm.collective_rpc("end_observation")

    held = Capture(folder)
    assert len(held.steps()) == len(eager) > 10
    compared = 0
    for step, heard in zip(held.steps(), eager, strict=True):
        for module in held.modules_of(step):
            for name in held.tensors(module, step):
                expected = heard.pop((module, name))
                found = held.load(module, name, step)
                if module == "rotary":  # written for both halves of a head
                    found = found[:, : expected.shape[1]]
                assert torch.equal(found.reshape(expected.shape), expected), (module, name, step.number)
                compared += 1
        assert not heard, "a module that ran was not captured"
    assert compared > 300


@pytest.mark.parametrize("compiler", ["fx", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_tokens_are_those_of_an_engine_that_captures_nothing(engines, tiny_llama, tmp_path, compiler):
    from vllm import SamplingParams

    sampled = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)
    params = [greedy(24), sampled, greedy(24), sampled, greedy(20)]
    prompts = [[3 + index, *PROMPTS[0][:29]] for index in range(5)]
    expected = engines(tiny_llama, **settings(compiler)).tokens(prompts, params)
    for number, overlap in enumerate((False, True)):
        capture = {"folder": str(tmp_path / str(number)), "modules": ["**"], "tensors": ["*"], "kv": True}
        # 9 blocks of 16 tokens, of which each of four requests comes to need four: some are preempted.
        tight = settings(compiler, tensor_capture=capture) | {"num_gpu_blocks_override": 10}
        engine = engines(tiny_llama, **tight, async_scheduling=overlap)
        assert engine.tokens(prompts, params) == expected
        assert engine.preemptions > 0


def test_filters_choose_steps_requests_and_tensors(engines, tiny_llama, folder):
    capture = {
        "folder": str(folder),
        "modules": ["model.layers.*.mlp", "lm_head"],
        "tensors": ["output.0", "input.0"],
        "phases": ["decode"],
        "requests": ["r*-*"],
        "steps": list(range(2, 9)),
    }
    engine = engines(tiny_llama, **settings(tensor_capture=capture))
    engine.run(PROMPTS, greedy())
    engine.llm.collective_rpc("end_observation")
    held = Capture(folder)
    assert {step.phase for step in held.steps()} == {"decode"}
    assert {step.number for step in held.steps()} <= set(range(2, 9))
    assert set(held.modules()) == {"model.layers.0.mlp", "model.layers.1.mlp"}, "greedy steps need no logits"
    assert set(held.tensors("model.layers.0.mlp", held.steps()[0])) == {"output.0", "input.0"}
    assert not held.caches()


def test_the_cache_of_a_request_is_its_blocks(engines, tiny_llama, folder):
    """Against a forward pass of transformers over the same tokens."""
    from transformers import AutoModelForCausalLM, DynamicCache

    engine = engines(
        tiny_llama, **settings(tensor_capture={"folder": str(folder), "modules": [], "kv": True})
    )
    engine.run(PROMPTS + PROMPTS[:1], greedy(), arrive=3)
    engine.llm.collective_rpc("end_observation")
    held = Capture(folder)
    caches = held.caches()
    assert len(caches) == len(PROMPTS) + 1
    assert sorted(cache.num_cached for cache in caches)[-1] >= 64, "the last finds the first one's blocks"
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for cache in caches:
        expected = DynamicCache()
        with torch.no_grad():
            model(torch.tensor([cache.token_ids]), past_key_values=expected, use_cache=True)
        for layer in range(cache.num_layers):
            pages = held.load_pages(cache.request, layer)["pages"]
            whole = pages.transpose(0, 1).flatten(1, 2)[:, : len(cache.token_ids)]
            keys, values = whole.split(cache.head_dim, dim=-1)
            torch.testing.assert_close(keys, expected.layers[layer].keys[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values, expected.layers[layer].values[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("capture", "complaint"),
    [
        ({"modules": ["model.layers.*"]}, "folder=None: must name a folder"),
        ({"folder": "x", "modules": []}, r"modules=\[\]: names no module"),
        ({"folder": "x", "module": ["a"]}, "module=.*unknown key; did you mean 'modules'"),
        ({"folder": "x", "modules": ["*"], "phases": ["decod"]}, "no such phase; did you mean 'decode'"),
        ({"folder": "x", "modules": ["*"], "max_bytes": 0}, "max_bytes=0: must be a whole number of bytes"),
        (["model"], "must be a JSON object"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(capture, complaint):
    from vllm_neuron.config import NeuronConfig

    with pytest.raises(ConfigError, match=complaint):
        NeuronConfig.from_additional_config({"neuron_config": {"tensor_capture": capture}})


def test_a_pattern_that_no_step_matches_is_refused_at_start(engines, tiny_llama, folder):
    capture = {"folder": str(folder), "modules": ["model.layers.*.mpl"]}
    with pytest.raises(Exception, match=r"model\.layers\.\*\.mpl.*matches no module that a step calls"):
        engines(tiny_llama, **settings(tensor_capture=capture))


def test_a_capture_that_grows_too_large_says_so(engines, tiny_llama, folder):
    capture = {"folder": str(folder), "modules": ["**"], "max_bytes": 100_000}
    expected = engines(tiny_llama, **settings()).tokens(PROMPTS, greedy())
    engine = engines(tiny_llama, **settings(tensor_capture=capture))
    assert engine.tokens(PROMPTS, greedy()) == expected, "it goes on serving"
    (problem,) = engine.llm.collective_rpc("end_observation")
    assert "beyond max_bytes=100000; narrow modules" in problem
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 150_000
    with pytest.raises(CaptureError, match="the folder holds a capture already"):
        engines(tiny_llama, **settings(tensor_capture=capture), seed=1)


def test_an_engine_that_captures_nothing_does_not_load_the_package(tiny_llama, graph_cache):
    program = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=2), use_tqdm=False)
print("loaded:", sorted(name for name in sys.modules if name.startswith("neuron_accuracy")))
llm.llm_engine.engine_core.shutdown()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tiny_llama), json.dumps(settings())],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "loaded: []" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.nightly
@pytest.mark.supports("tensor capture", model="qwen3")
def test_captures_of_two_ranks_make_those_of_one(tiny_qwen3, tmp_path):
    """As real processes: whole tensors of one rank, and what two hold of each, are compared to be the same."""
    from neuron_accuracy.capture.spec import CaptureSpec
    from neuron_accuracy.compare.captures import compare_captures
    from neuron_accuracy.kv.compare import compare_caches
    from vllm_neuron.accuracy.subject import open_engine

    spec = CaptureSpec(("**",), ("output.*", "input.*"), kv=True)
    prompts, tokens = PROMPTS[:3], [[9, 8, 7]] * 3
    for ranks in (1, 2):
        subject = open_engine(
            str(tiny_qwen3), {**settings(), "skip_tokenizer_init": True, "tensor_parallel_size": ranks}
        )
        subject.capture(prompts, tokens, spec, tmp_path / str(ranks))
        subject.close()
    one, two = (Capture(tmp_path / str(ranks)) for ranks in (1, 2))
    outcome = compare_captures(two, one)
    assert outcome.passed, outcome.faults
    assert outcome.data["unpaired"] == {"test": [], "reference": []}
    assert len(outcome.data["modules"]) > 50
    caches = compare_caches(two, one)
    assert caches.passed, caches.faults


def test_names_of_compared_tensors_are_unique(tiny_llama, engines, folder):
    engine = engines(tiny_llama, **settings(tensor_capture={"folder": str(folder), "modules": ["lm_head"]}))
    from vllm_neuron.accuracy.conventions import names

    found = names(engine.runner.executor.model)
    for one, other in itertools.combinations(found.values(), 2):
        assert one != other
    engine.llm.collective_rpc("end_observation")
