# SPDX-License-Identifier: Apache-2.0
"""Requests that hold each other's blocks: samples of one prompt, aborts, preemption, and who may not look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams

SEGMENT, BLOCK = 32, 16
POOL = 18
"""Blocks to use; one request may come to hold 16."""


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, engines: Any, tiny_llama: Path) -> Any:
    buckets = {"compiler": "fx", "prefill_buckets": [SEGMENT], "decode_buckets": [4]}
    return engines(
        tiny_llama,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=SEGMENT,
        num_gpu_blocks_override=POOL + 1,
        async_scheduling=request.param,
        additional_config={"neuron_config": buckets},
    )


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


def drain(engine: Any) -> dict[str, Any]:
    finished: dict[str, Any] = {}
    while engine.engine.has_unfinished_requests():
        finished |= {name: output for name, output in engine.step().items() if output.finished}
    return finished


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.fixture
def prompt_tokens(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prefill row of the engine."""
    rows: list[int] = []
    schedule = engine.scheduler.schedule

    def counting(*args: Any) -> Any:
        output = schedule(*args)
        rows.extend(count for count in output.num_scheduled_tokens.values() if count > 1)
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", counting)
    return rows


@pytest.mark.parametrize("cached", [False, True])
def test_samples_of_one_prompt_share_its_blocks(engine, tiny_llama, continuations, prompt_tokens, cached):
    # The likeliest token alone may be drawn: vLLM allows several samples only with a temperature.
    prompt = text(28, 1)
    (answer,) = continuations(tiny_llama, [prompt], 12)
    if cached:
        assert engine.tokens([prompt], greedy(12)) == [answer]
    prompt_tokens.clear()
    params = SamplingParams(n=3, temperature=1.0, top_k=1, max_tokens=12, ignore_eos=True)
    (output,) = engine.run([prompt], params)
    assert [list(sample.token_ids) for sample in output.outputs] == [answer] * 3
    # One block is whole: computed by the first of them, or by whoever came before.
    assert sum(prompt_tokens) == 2 * 12 + (12 if cached else 28)


@pytest.mark.parametrize("sharer", [False, True], ids=["alone", "another-shares-its-prefix"])
def test_abort_between_segments_of_a_prompt_leaves_what_others_share(
    engine, tiny_llama, continuations, check_blocks, sharer
):
    prompt = text(100, 2)
    other = prompt[:50] + text(30, 3)
    victim = engine.add(prompt, greedy(8))
    for _ in range(2):
        engine.step()
    (request,) = engine.scheduler.running
    assert request.num_computed_tokens in (SEGMENT, 2 * SEGMENT) and not request.output_token_ids
    alive = [engine.add(other, greedy(8))] if sharer else []
    engine.step()
    engine.engine.abort_request([victim])
    check_blocks(engine.scheduler)
    finished = drain(engine)
    assert list(finished) == alive
    again, beside = engine.run([prompt, other], greedy(8))
    expected = continuations(tiny_llama, [prompt, other], 8)
    assert [tokens(again), tokens(beside)] == expected
    assert again.num_cached_tokens > 0 and beside.num_cached_tokens >= 48
    for name in alive:
        assert finished[name].num_cached_tokens == 48 and tokens(finished[name]) == expected[1]


def test_abort_while_decoding_leaves_what_others_share(engine, tiny_llama, continuations, check_blocks):
    prompt = text(40, 4)
    (answer,) = continuations(tiny_llama, [prompt], 30)
    other = prompt[:32] + text(20, 5)
    victim = engine.add(prompt, greedy(60))
    for _ in range(14):
        engine.step()
    (request,) = engine.scheduler.running
    assert 8 <= request.num_output_tokens < 30
    drawn = answer[: request.num_output_tokens]
    sharer = engine.add(other, greedy(20))
    for _ in range(3):
        engine.step()
    engine.engine.abort_request([victim])
    check_blocks(engine.scheduler)
    output = drain(engine)[sharer]
    assert output.num_cached_tokens == 32
    longer = [*prompt, *drawn, 5]
    (after,) = engine.run([longer], greedy(20))
    # The victim's own tokens are found too, as far as they filled blocks.
    assert after.num_cached_tokens == 48
    assert [tokens(output), tokens(after)] == continuations(tiny_llama, [other, longer], 20)


def test_preempted_requests_that_share_a_prefix_go_on_with_their_own_text(
    engine, tiny_llama, continuations, check_blocks
):
    # Four of 112 tokens are 28 blocks; sharing two leaves 22, and there are 18.
    shared = text(32, 6)
    prompts = [shared + text(10 + index, 7 + index) for index in range(4)]
    before = engine.preemptions
    names = [engine.add(prompt, greedy(70)) for prompt in prompts]
    finished: dict[str, Any] = {}
    while engine.engine.has_unfinished_requests():
        finished |= {name: output for name, output in engine.step().items() if output.finished}
        check_blocks(engine.scheduler)
    assert engine.preemptions > before
    outputs = [finished[name] for name in names]
    assert [output.num_cached_tokens for output in outputs[1:]] == [32] * 3
    assert [tokens(output) for output in outputs] == continuations(tiny_llama, prompts, 70)


def test_segments_need_not_be_whole_blocks(engines, tiny_llama, continuations):
    # A segment ends inside a block, and the next begins there; hits are whole blocks all the same.
    segment = 37
    buckets = {"compiler": "fx", "prefill_buckets": [segment], "decode_buckets": [2]}
    engine = engines(
        tiny_llama,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=segment,
        num_gpu_blocks_override=40,
        additional_config={"neuron_config": buckets},
    )
    first = text(150, 20)
    prompts = [first, first[:75] + text(60, 21), first[:111]]
    outputs = [engine.run([prompt], greedy(8))[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 64, 96]
    assert [tokens(output) for output in outputs] == continuations(tiny_llama, prompts, 8)


def skips(engine: Any) -> float:
    """Skips of the prefix cache on the page of metrics."""
    labels = {"model_name": engine.core.vllm_config.model_config.served_model_name, "rank_id": "0"}
    return REGISTRY.get_sample_value("vllm_neuron:prefix_cache_skips_total", labels) or 0


@pytest.mark.parametrize(
    "params",
    [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}],
    ids=["prompt_logprobs", "by-name"],
)
def test_a_request_that_may_not_look_into_the_cache_is_counted(
    engine, tiny_llama, continuations, prompt_tokens, params
):
    prompt = text(40, 8)
    expected = continuations(tiny_llama, [prompt], 4)
    assert engine.tokens([prompt], greedy(4)) == expected
    before = skips(engine)
    (found,) = engine.run([prompt], greedy(4))
    assert found.num_cached_tokens == 32 and skips(engine) == before
    prompt_tokens.clear()
    (asked,) = engine.run([prompt], greedy(4, **params))
    assert not asked.num_cached_tokens and sum(prompt_tokens) == 40
    assert skips(engine) == before + 1
    assert tokens(asked) == tokens(found) == expected[0]
