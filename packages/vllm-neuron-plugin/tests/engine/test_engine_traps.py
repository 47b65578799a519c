# SPDX-License-Identifier: Apache-2.0
"""Public bug reports against peers, and the traps of vLLM's interfaces, held against a real engine."""

from __future__ import annotations

import random

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 256), k=length)


def test_greedy_equals_transformers_for_mixed_lengths(engine, reference):
    prompts = [prompt(length, length) for length in (1, 2, 15, 16, 17, 63, 64, 65, 100)]
    assert engine.greedy(prompts, 12) == [reference(p, 12) for p in prompts]


def test_33_requests_get_33_right_answers(engine, reference):
    prompts = [prompt(5, seed) for seed in range(33)]
    assert engine.greedy(prompts, 8) == [reference(p, 8) for p in prompts]


def test_preempted_requests_end_with_the_same_text(engine, reference, monkeypatch):
    # 12 requests of 7 blocks at their end, and 40 blocks.
    preempted = []
    original = engine.scheduler._preempt_request
    monkeypatch.setattr(
        engine.scheduler,
        "_preempt_request",
        lambda r, *a, **k: (preempted.append(r.request_id), original(r, *a, **k))[1],
    )
    prompts = [prompt(60, 100 + seed) for seed in range(12)]
    assert engine.greedy(prompts, 40) == [reference(p, 40) for p in prompts]
    assert preempted


def test_same_prompt_three_times_hits_0_2_2_blocks_with_equal_text(engine, reference):
    tokens = prompt(40, 1)
    settings = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    texts, hits = [], []
    for _ in range(3):
        (output,) = engine.llm.generate([{"prompt_token_ids": tokens}], settings, use_tqdm=False)
        texts.append(list(output.outputs[0].token_ids))
        hits.append(output.num_cached_tokens // 16)
    assert texts == [reference(tokens, 8)] * 3
    assert hits == [0, 2, 2]


def test_prefix_hit_that_just_fits_while_another_decodes(engine, reference):
    first = prompt(100, 2)
    second = first[:32] + prompt(88, 3)
    llm = engine.llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm.add_request(
        "first", {"prompt_token_ids": first}, SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    )
    finished = {}
    for step in range(200):
        if step == 6:
            llm.add_request("second", {"prompt_token_ids": second}, params)
        finished |= {o.request_id: list(o.outputs[0].token_ids) for o in llm.step() if o.finished}
        if len(finished) == 2:
            break
    assert finished == {"first": reference(first, 28), "second": reference(second, 8)}


def test_abort_while_a_long_prompt_is_chunked(engine):
    llm = engine.llm.llm_engine
    llm.add_request("gone", {"prompt_token_ids": prompt(120, 4)}, SamplingParams(max_tokens=4))
    llm.step()
    assert any(request.is_prefill_chunk for request in engine.scheduler.running)
    llm.abort_request(["gone"])
    while llm.has_unfinished_requests() or engine.scheduler.has_requests():
        llm.step()


def test_steps_without_tokens_change_nothing(engine, reference):
    for seed in (5, 6):
        tokens = prompt(20, seed)
        assert engine.greedy([tokens], 5) == [reference(tokens, 5)]
        for _ in range(3):
            engine.core.model_executor.execute_model(engine.scheduler.schedule(False))


def test_allowed_tokens_hold_at_temperature_zero(engine):
    assert engine.greedy([prompt(9, 7)], 3, allowed_token_ids=[77]) == [[77, 77, 77]]


def test_bad_words_hold_at_temperature_zero(engine, reference):
    tokens = prompt(9, 8)
    (banned, *_) = reference(tokens, 1)
    word = engine.llm.get_tokenizer().decode([banned])
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, bad_words=[word])
    (output,) = engine.llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    assert banned not in output.outputs[0].token_ids


def test_logprobs_for_the_request_that_asked_and_no_other(engine):
    prompts = [{"prompt_token_ids": prompt(9, seed)} for seed in (9, 10)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=3, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=3),
    ]
    asked, other = engine.llm.generate(prompts, params, use_tqdm=False)
    assert other.outputs[0].logprobs is None
    for token, entry in zip(asked.outputs[0].token_ids, asked.outputs[0].logprobs, strict=True):
        assert entry[token].rank == 1 and len(entry) == 2


def test_top_k_above_the_vocabulary_and_greedy_in_one_batch(engine, reference):
    prompts = [prompt(9, 11), prompt(9, 12), prompt(9, 13)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=5, seed=1, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=257, seed=1, max_tokens=6, ignore_eos=True),
    ]
    outputs = engine.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert list(outputs[0].outputs[0].token_ids) == reference(prompts[0], 6)
    assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)


def test_prompt_longer_than_the_limit_is_a_client_error(engine):
    with pytest.raises((VLLMValidationError, ValueError), match="128"):
        engine.llm.generate(
            [{"prompt_token_ids": prompt(129, 14)}], SamplingParams(max_tokens=1), use_tqdm=False
        )


def test_refused_parameter_is_a_client_error_and_the_engine_lives(engine):
    with pytest.raises(VLLMValidationError, match=r"parameter=extra_args\.kv_transfer_params"):
        params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"x": 1}})
        engine.llm.generate([{"prompt_token_ids": [5]}], params, use_tqdm=False)
