# SPDX-License-Identifier: Apache-2.0
"""After ready nothing is compiled, whatever is asked, and every block comes back."""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

NUM_REQUESTS = 200


@pytest.fixture
def no_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, arguments: Any, *rest: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


def random_params(rng: np.random.Generator, room: int) -> SamplingParams:
    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.3 else otherwise

    greedy = rng.random() < 0.3
    least = int(maybe(rng.integers(0, 4), 0))
    return SamplingParams(
        n=1 if greedy else int(maybe(rng.integers(2, 4), 1)),
        temperature=0.0 if greedy else float(rng.uniform(0.1, 2.0)),
        top_k=int(maybe(rng.integers(1, 300), 0)),
        top_p=float(maybe(rng.uniform(0.1, 1.0), 1.0)),
        min_p=float(maybe(rng.uniform(0.0, 0.5), 0.0)),
        seed=maybe(int(rng.integers(0, 2**31)), None),
        presence_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),
        frequency_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),
        repetition_penalty=float(maybe(rng.uniform(0.5, 2.0), 1.0)),
        logprobs=maybe(int(rng.integers(0, 6)), None),
        prompt_logprobs=maybe(int(rng.integers(0, 6)), None),
        logit_bias=maybe({int(rng.integers(3, 256)): 3.0}, None),
        allowed_token_ids=maybe(rng.choice(253, 20, replace=False).tolist(), None),
        stop_token_ids=[int(token) for token in rng.integers(3, 256, 2)],
        min_tokens=min(least, room),
        max_tokens=int(rng.integers(max(least, 1), 25)) if room > 24 else room,
    )


@pytest.mark.supports("nothing compiled after ready", model="llama")
def test_200_mixed_requests_compile_nothing_and_give_every_block_back(tiny_both, no_new_process):
    engine, rng = tiny_both, np.random.default_rng(11)
    graphs = engine.graph_counts()
    frames = dict(torch._dynamo.utils.counters["frames"])
    free = engine.free_blocks
    alive: set[str] = set()
    aborted: set[str] = set()
    finished: dict[str, Any] = {}
    widest = 0
    for number in range(NUM_REQUESTS):
        # The shortest and the longest prompt there are, then any length between.
        length = {0: 1, 1: 255}.get(
            number, int(rng.integers(1, 256)) if rng.random() < 0.2 else int(rng.integers(1, 40))
        )
        params = random_params(rng, room=256 - length)
        alive.add(engine.add(rng.integers(3, 256, length).tolist(), params))
        for _ in range(int(rng.integers(0, 3))):
            finished |= {name: output for name, output in engine.step().items() if output.finished}
            widest = max(widest, len(engine.scheduler.running))
        alive -= finished.keys()
        if number % 10 == 9 and alive:
            victim = sorted(alive)[int(rng.integers(len(alive)))]
            engine.engine.abort_request([victim])
            aborted.add(victim)
            alive.discard(victim)
    while engine.engine.has_unfinished_requests():
        finished |= {name: output for name, output in engine.step().items() if output.finished}
        widest = max(widest, len(engine.scheduler.running))
    engine.check_idle()
    assert len(aborted) >= 15 and widest == 33
    assert len(finished.keys() - aborted) == NUM_REQUESTS - len(aborted)
    assert engine.graph_counts() == graphs and engine.free_blocks == free
    assert dict(torch._dynamo.utils.counters["frames"]) == frames


def test_a_shape_outside_the_plan_is_an_error_and_not_a_compile(tiny):
    from neuron_core.errors import UncompiledShapeError
    from neuron_core.graphs.buckets import Bucket, Phase

    graphs = tiny.graph_counts()
    with pytest.raises(UncompiledShapeError, match="num_seqs=5"):
        tiny.runner.executor.run(Bucket(Phase.DECODE, 5, 5, 256), "greedy", {})
    assert tiny.graph_counts() == graphs


@pytest.mark.supports("seeds", model="llama")
def test_the_same_seed_gives_the_same_text_in_any_batch(tiny_both, make_prompts):
    engine = tiny_both
    prompts = make_prompts(12, 80, seed=5)
    params = [
        SamplingParams(
            temperature=1.2, seed=100 + index, top_k=40 * (index % 2), max_tokens=20, ignore_eos=True
        )
        for index in range(len(prompts))
    ]
    together = engine.tokens(prompts, params)
    assert engine.tokens(prompts[::-1], params[::-1], arrive=3)[::-1] == together
    assert [engine.tokens([p], [each])[0] for p, each in zip(prompts, params, strict=True)] == together
    other = [SamplingParams(temperature=1.2, seed=7, max_tokens=20, ignore_eos=True)]
    assert engine.tokens(prompts[:1], other) != together[:1]


def test_a_greedy_step_takes_the_graph_without_a_sampler(tiny, make_prompts, monkeypatch):
    variants: list[str] = []
    run = tiny.runner.executor.run
    monkeypatch.setattr(
        tiny.runner.executor, "run", lambda b, v, values: (variants.append(v), run(b, v, values))[1]
    )
    prompts = make_prompts(3, 30, seed=6)
    tiny.tokens(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert set(variants) == {"greedy"}
    tiny.tokens(prompts[:1], SamplingParams(temperature=0.5, max_tokens=4, ignore_eos=True))
    assert "sample" in variants
