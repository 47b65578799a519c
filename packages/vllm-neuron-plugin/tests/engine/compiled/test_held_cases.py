# SPDX-License-Identifier: Apache-2.0
"""Public bug reports of peers about prefix caching and asynchronous scheduling, by case id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

FX = {"compiler": "fx"}


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def make_engine(request: pytest.FixtureRequest, engines: Any, tiny_llama: Path) -> Any:
    """``make_engine(neuron=..., **settings)``: an engine with and one without asynchronous scheduling."""

    def make(*, neuron: dict[str, Any], **settings: Any) -> Any:
        return engines(
            tiny_llama,
            dtype="float32",
            async_scheduling=request.param,
            additional_config={"neuron_config": FX | neuron},
            **settings,
        )

    return make


def test_x2_a_hit_shorter_than_one_chunk(make_engine, tiny_llama, continuations):
    settings = {"max_model_len": 256, "max_num_seqs": 4, "block_size": 64, "num_gpu_blocks_override": 40}
    buckets = {"prefill_buckets": [128], "decode_buckets": [4]}
    engine = make_engine(neuron=buckets, max_num_batched_tokens=128, **settings)
    first = text(192, 20)
    second = first[:64] + text(86, 21)
    expected = continuations(tiny_llama, [first, second], 16)
    outputs = [engine.run([prompt], greedy(16))[0] for prompt in (first, second)]
    assert [output.num_cached_tokens for output in outputs] == [0, 64]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_x3_prompt_logprobs_of_a_prompt_that_is_cached(make_engine, tiny_llama, monkeypatch):
    from transformers import AutoModelForCausalLM

    settings = {"max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
    engine = make_engine(neuron={"prefill_buckets": [256]}, max_num_batched_tokens=256, **settings)
    prompt = text(33, 30)
    # The blocks are there: a request without prompt log-probabilities finds them before and after.
    assert [engine.run([prompt], greedy(1))[0].num_cached_tokens for _ in range(2)] == [0, 32]
    asked = [engine.run([prompt], greedy(1, prompt_logprobs=1))[0] for _ in range(2)]
    assert engine.run([prompt], greedy(1))[0].num_cached_tokens == 32

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for output in asked:
        assert not output.num_cached_tokens
        assert len(output.prompt_logprobs) == 33 and output.prompt_logprobs[0] is None
        for place, entries in enumerate(output.prompt_logprobs[1:]):
            token = prompt[place + 1]
            assert entries[token].logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
    values = [
        [{token: entry.logprob for token, entry in entries.items()} for entries in output.prompt_logprobs[1:]]
        for output in asked
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize(("num_blocks", "together"), [(6, False), (7, True)])
def test_a1_preemption_while_an_output_is_in_flight(
    make_engine, tiny_llama, continuations, num_blocks, together
):
    # One block is nobody's, and each prompt takes three: of six blocks the second request gets none.
    settings = {"max_model_len": 80, "max_num_seqs": 2, "num_gpu_blocks_override": num_blocks}
    engine = make_engine(
        neuron={"prefill_buckets": [80], "decode_buckets": [2]}, max_num_batched_tokens=80, **settings
    )
    prompts = [text(40, seed) for seed in (40, 41)]
    before = engine.preemptions
    # Both need five to end, so that two which run together displace each other.
    assert engine.tokens(prompts, greedy(40)) == continuations(tiny_llama, prompts, 40)
    assert (engine.preemptions > before) == together


@pytest.fixture
def inputs_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Least token id and number of requests of every step that reached the graphs."""
    from vllm_neuron.runner import model_runner

    seen: list[tuple[int, int]] = []
    build = model_runner.build

    def watched(table: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = build(table, batch, *args, **kwargs)
        seen.append((int(step.token_ids.min()), len(batch.requests)))
        return step

    monkeypatch.setattr(model_runner, "build", watched)
    return seen


def test_s9_no_placeholder_reaches_a_graph_when_requests_skip_steps(
    make_engine, tiny_llama, continuations, inputs_seen
):
    # A prompt chunk and a decode step take turns: whoever decodes is left out of every other step.
    settings = {"max_model_len": 256, "max_num_seqs": 3, "num_gpu_blocks_override": 60}
    buckets = {"prefill_buckets": [16], "decode_buckets": [3], "max_consecutive_prefills": 1}
    engine = make_engine(neuron=buckets, max_num_batched_tokens=16, **settings)
    prompts = [text(length, 90 + length) for length in (5, 100, 150)]
    ids = [engine.add(prompt, greedy(30)) for prompt in prompts]
    finished: dict[str, Any] = {}
    skipped = 0
    while engine.engine.has_unfinished_requests():
        steps = len(inputs_seen)
        finished |= engine.step()
        skipped += any(count < len(engine.scheduler.running) for _, count in inputs_seen[steps:])
    assert [list(finished[name].outputs[0].token_ids) for name in ids] == continuations(
        tiny_llama, prompts, 30
    )
    assert skipped > 10
    assert min(least for least, _ in inputs_seen) >= 0


def test_t9_each_of_two_requests_only_just_fits(make_engine, tiny_llama, continuations):
    # The second comes with a hit of two blocks while the first decodes, and both end with the last place there is.
    settings = {"max_model_len": 96, "max_num_seqs": 2, "num_gpu_blocks_override": 13}
    engine = make_engine(neuron={"prefill_buckets": [96]}, max_num_batched_tokens=96, **settings)
    first = text(60, 91)
    second = first[:32] + text(40, 92)
    ids = [engine.add(first, greedy(36))]
    finished: dict[str, Any] = {}
    for _ in range(6):
        finished |= engine.step()
    ids.append(engine.add(second, greedy(24)))
    while engine.engine.has_unfinished_requests():
        finished |= {name: output for name, output in engine.step().items() if output.finished}
    assert finished[ids[1]].num_cached_tokens == 32
    assert list(finished[ids[0]].outputs[0].token_ids) == continuations(tiny_llama, [first], 36)[0]
    assert list(finished[ids[1]].outputs[0].token_ids) == continuations(tiny_llama, [second], 24)[0]


def test_t9_a_token_beyond_the_compiled_length_is_refused_on_the_cpu_too(make_engine):
    settings = {"max_model_len": 96, "max_num_seqs": 2, "num_gpu_blocks_override": 13}
    engine = make_engine(neuron={"prefill_buckets": [96]}, max_num_batched_tokens=96, **settings)
    with pytest.raises(VLLMValidationError, match="96"):
        engine.add(text(97, 93), greedy(1))
    # With less room than asked for, the context's end is the text's end.
    (output,) = engine.run([text(90, 94)], greedy(20))
    assert len(output.outputs[0].token_ids) == 6 and output.outputs[0].finish_reason == "length"
