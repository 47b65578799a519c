# SPDX-License-Identifier: Apache-2.0
"""Steps submitted before the one before has been read: the same answers, and the device never waits for the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from neuron_core.metrics import PREFIX

TOOLS = Path(__file__).parents[5] / "tools"
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "additional_config": {"neuron_config": {"prefill_buckets": [64], "decode_buckets": [4, 8]}},
}


def requests() -> tuple[list[list[int]], list[Any]]:
    """Prompts of several lengths, and every kind of sampling that reads earlier tokens or leaves the graph."""
    from vllm import SamplingParams

    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.4, "logprobs": 1},
        {"temperature": 0.7, "seed": 5, "presence_penalty": 0.8, "frequency_penalty": 0.6},
        {"temperature": 0, "min_tokens": 12, "stop_token_ids": [*range(0, 256, 3)]},
        {"temperature": 0, "prompt_logprobs": 2},
        {"temperature": 1.1, "seed": 8, "n": 2, "top_k": 9},
        {"temperature": 0, "logit_bias": {7: 3.0}, "prompt_logprobs": 0, "logprobs": 0},
        {"temperature": 0.8, "seed": 9, "stop_token_ids": [*range(0, 256, 7)], "top_p": 0.9},
    ]
    prompts = [[(5 * i + 3 * j) % 250 for j in range(4 + 11 * i)] for i in range(len(kinds))]
    each = [
        SamplingParams(max_tokens=18 + i, detokenize=False, ignore_eos=True, **kind)
        for i, kind in enumerate(kinds)
    ]
    return prompts, each


def facts(outputs: list[Any]) -> list[Any]:
    """What a client would see of each request."""

    def scores(found: Any) -> Any:
        return found and [
            place and {token: (round(lp.logprob, 4), lp.rank) for token, lp in place.items()}
            for place in found
        ]

    return [
        [
            (list(o.token_ids), o.finish_reason, o.stop_reason, scores(o.logprobs))
            for o in sorted(output.outputs, key=lambda o: o.index)
        ]
        + [scores(output.prompt_logprobs)]
        for output in outputs
    ]


def counter(name: str) -> float:
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"{PREFIX}{name}"
    )


@pytest.fixture(scope="module")
def make(engines: Callable[..., Any], tiny_llama: Path) -> Callable[[bool, int], Any]:
    def make(overlap: bool, blocks: int) -> Any:
        return engines(tiny_llama, **LIMITS, num_gpu_blocks_override=blocks, async_scheduling=overlap)

    return make


@pytest.mark.supports("asynchronous scheduling", model="llama")
@pytest.mark.parametrize(
    ("blocks", "arrive"), [(80, 0), (80, 3), (16, 0)], ids=["together", "staggered", "preemption"]
)
def test_answers_are_those_of_reading_every_step(make, blocks, arrive):
    prompts, params = requests()
    expected = facts(make(False, blocks).run(prompts, params, arrive=arrive))
    engine = make(True, blocks)
    preempted = engine.preemptions
    assert facts(engine.run(prompts, params, arrive=arrive)) == expected
    assert (engine.preemptions > preempted) == (blocks < 80)


@pytest.fixture
def watched(make, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[tuple[list[str], int, bool]]]]:
    """An overlapped engine, and of each step: its requests, its padded rows, whether one was in flight before it."""
    engine = make(True, 80)
    seen: list[tuple[list[str], int, bool]] = []
    submit = engine.runner._submit

    def watching(step: Any) -> None:
        names = [request.request_id for request in step.batch.requests]
        seen.append((names, step.batch.bucket.num_seqs, bool(engine.runner._in_flight)))
        submit(step)

    run = engine.runner.executor.run

    def slowly(*arguments: Any) -> Any:
        # A tiny model's step can be over before the next is scheduled, and then nothing overlaps.
        time.sleep(0.01)
        return run(*arguments)

    monkeypatch.setattr(engine.runner, "_submit", watching)
    monkeypatch.setattr(engine.runner.executor, "run", slowly)
    yield engine, seen


def test_it_falls_back_when_the_requests_change_and_only_then(watched):
    from vllm import SamplingParams

    engine, seen = watched
    before = counter("async_steps_total"), counter("sync_fallback_steps_total")
    prompts = [[3, 1, 4 + i] for i in range(5)]
    # Lengths that are not known to the scheduler beforehand: a request that stops leaves a step behind.
    params = [SamplingParams(temperature=0, max_tokens=12 + 9 * i, ignore_eos=True) for i in range(5)]
    engine.run(prompts, params, arrive=4)
    engine.check_idle()
    overlapped = fallbacks = 0
    for (names, rows, in_flight), (old_names, old_rows, _) in zip(seen[1:], seen, strict=False):
        overlapped += in_flight
        shared = [name for name in names if name in old_names]
        fallbacks += in_flight and bool(shared) and not (names == old_names and rows == old_rows)
    after = counter("async_steps_total"), counter("sync_fallback_steps_total")
    assert after[1] - before[1] == fallbacks > 0
    assert after[0] - before[0] == overlapped - fallbacks > 0


def test_a_step_that_fails_ends_the_engine_with_its_reason(engines, tiny_llama, monkeypatch):
    from vllm import SamplingParams

    engine = engines(tiny_llama, **LIMITS, num_gpu_blocks_override=40, async_scheduling=True)
    run, calls = engine.runner.executor.run, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("the device is on fire")
        return run(*args)

    monkeypatch.setattr(engine.runner.executor, "run", failing)
    with pytest.raises(RuntimeError, match="on fire"):
        engine.tokens([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    engines.made.pop(next(key for key, made in engines.made.items() if made is engine))
    engine.engine.engine_core.shutdown()


SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from neuron_core.metrics import PREFIX
from prometheus_client import REGISTRY

if __name__ == "__main__":
    model, prompts, settings = json.loads(sys.argv[1])
    llm = LLM(model, **settings)
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counts = {s.name: s.value for m in REGISTRY.collect() for s in m.samples if s.name.startswith(PREFIX)}
    print("FOUND", json.dumps([[list(o.outputs[0].token_ids) for o in outputs], counts]))
"""


def on_latency_device(tmp_path: Path, cache: Path, model: Path, prompts: list[list[int]]) -> Any:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "PYTHONPATH": f"{TOOLS / 'latency_device'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "VLLM_NEURON_DEVICE": "latency",
        "VLLM_NEURON_CACHE_DIR": str(cache),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    settings = LIMITS | {"num_gpu_blocks_override": 80, "skip_tokenizer_init": True}
    argument = json.dumps([str(model), prompts, settings])
    done = subprocess.run(
        [sys.executable, str(script), argument], env=environment, capture_output=True, text=True, timeout=240
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(found[0].removeprefix("FOUND "))


def test_a_device_of_its_own_is_given_the_next_step_while_it_runs(make, tmp_path, graph_cache, tiny_llama):
    from vllm import SamplingParams

    prompts = [[3, 1, 4 + i] for i in range(3)]
    # Nobody asks for asynchronous scheduling: it is the default of a device that leaves the host's processors free.
    tokens, counts = on_latency_device(tmp_path, graph_cache, tiny_llama, prompts)
    assert tokens == make(False, 80).tokens(
        prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    )
    # 39 decode steps go on with the three requests of the step before; a busy machine may miss a few.
    assert counts[f"{PREFIX}async_steps_total"] > 25
    assert counts.get(f"{PREFIX}sync_fallback_steps_total", 0) <= 1
