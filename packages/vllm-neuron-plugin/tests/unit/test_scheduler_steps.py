# SPDX-License-Identifier: Apache-2.0
"""Step tables: which requests compute how many tokens in which step, worked out by hand."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

PREFILL, DECODE, NOTHING = "prefill", "decode", "-"


def run(harness, num_steps):
    return [harness.row() for _ in range(num_steps)]


def series(harness, name):
    labels = {"model_name": harness.scheduler.vllm_config.model_config.served_model_name, "rank_id": "0"}
    return REGISTRY.get_sample_value(f"vllm_neuron:{name}", labels) or 0


def test_one_request_prefills_then_decodes(make_scheduler):
    harness = make_scheduler()
    harness.add("a", 20, max_tokens=3)
    assert run(harness, 3) == [(PREFILL, {"a": 20}), (DECODE, {"a": 1}), (DECODE, {"a": 1})]
    harness.finish()
    harness.check_idle()


def test_short_prompts_share_a_prefill_step(make_scheduler):
    harness = make_scheduler()
    for name, length in (("a", 10), ("b", 30), ("c", 5)):
        harness.add(name, length, max_tokens=2)
    assert run(harness, 2) == [(PREFILL, {"a": 10, "b": 30, "c": 5}), (DECODE, {"a": 1, "b": 1, "c": 1})]
    harness.finish()
    harness.check_idle()


def test_prefill_rows_are_limited(make_scheduler):
    harness = make_scheduler(neuron={"max_prefill_seqs": 2})
    for name in "abc":
        harness.add(name, 4, max_tokens=3)
    assert run(harness, 3) == [
        (PREFILL, {"a": 4, "b": 4}),
        (PREFILL, {"c": 4}),
        (DECODE, {"a": 1, "b": 1, "c": 1}),
    ]


def test_long_prompt_is_chunked_to_the_largest_bucket(make_scheduler):
    harness = make_scheduler(max_num_batched_tokens=32, neuron={"prefill_buckets": [16, 32]})
    harness.add("a", 70, max_tokens=2)
    assert run(harness, 4) == [
        (PREFILL, {"a": 32}),
        (PREFILL, {"a": 32}),
        (PREFILL, {"a": 6}),
        (DECODE, {"a": 1}),
    ]


def test_rest_of_a_long_prompt_shares_its_step_with_the_next(make_scheduler):
    harness = make_scheduler(max_num_batched_tokens=32)
    harness.add("a", 40, max_tokens=2)
    harness.add("b", 10, max_tokens=2)
    assert run(harness, 3) == [(PREFILL, {"a": 32}), (PREFILL, {"a": 8, "b": 10}), (DECODE, {"a": 1, "b": 1})]


def test_decodes_are_held_back_while_a_prompt_is_computed(make_scheduler):
    harness = make_scheduler(max_num_batched_tokens=32)
    harness.add("a", 8, max_tokens=4)
    assert run(harness, 2) == [(PREFILL, {"a": 8}), (DECODE, {"a": 1})]
    harness.add("b", 50, max_tokens=2)
    assert run(harness, 3) == [(PREFILL, {"b": 32}), (PREFILL, {"b": 18}), (DECODE, {"a": 1, "b": 1})]


def test_decodes_run_after_the_longest_row_of_prefills(make_scheduler):
    harness = make_scheduler(
        max_num_batched_tokens=16, neuron={"max_consecutive_prefills": 2, "prefill_buckets": [16]}
    )
    harness.add("a", 8, max_tokens=4)
    harness.row()
    harness.add("b", 64, max_tokens=2)
    assert run(harness, 6) == [
        (PREFILL, {"b": 16}),
        (PREFILL, {"b": 16}),
        (DECODE, {"a": 1}),
        (PREFILL, {"b": 16}),
        (PREFILL, {"b": 16}),
        (DECODE, {"a": 1, "b": 1}),
    ]


def test_prompt_of_one_token_is_a_prefill(make_scheduler):
    harness = make_scheduler()
    harness.add("a", 1, max_tokens=2)
    assert run(harness, 2) == [(PREFILL, {"a": 1}), (DECODE, {"a": 1})]


def test_chunk_of_one_token_is_a_prefill(make_scheduler):
    harness = make_scheduler(max_num_batched_tokens=16, max_num_seqs=4)
    harness.add("d", 3, max_tokens=8)
    harness.row()
    harness.add("a", 17, max_tokens=2)
    assert run(harness, 3) == [(PREFILL, {"a": 16}), (PREFILL, {"a": 1}), (DECODE, {"d": 1, "a": 1})]


def test_prefix_hit_that_leaves_one_token_is_a_prefill(make_scheduler):
    harness = make_scheduler(enable_prefix_caching=True)
    prompt = [*range(3, 3 + 33)]
    harness.add("a", prompt, max_tokens=1)
    harness.finish()
    harness.add("d", 5, max_tokens=8)
    harness.row()
    harness.add("b", prompt, max_tokens=2)
    assert run(harness, 2) == [(PREFILL, {"b": 1}), (DECODE, {"d": 1, "b": 1})]


@pytest.mark.parametrize("depth", [1, 2])
def test_same_prompt_three_times_hits_0_2_2_blocks(make_scheduler, depth):
    # The hit is what the first step does not compute: 40 tokens are two full blocks and a half.
    harness = make_scheduler(enable_prefix_caching=True, depth=depth)
    prompt = [*range(3, 43)]
    computed = []
    for name in "abc":
        harness.add(name, prompt, max_tokens=3)
        computed.append(harness.step().num_scheduled_tokens[name])
        harness.finish()
    assert computed == [40, 8, 8]
    harness.check_idle()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}], ids=str)
def test_a_request_that_may_not_read_the_cache_computes_everything_and_counts(
    make_scheduler, params, caching
):
    harness = make_scheduler(enable_prefix_caching=caching)
    prompt = [*range(3, 43)]
    harness.add("a", prompt, max_tokens=1)
    harness.finish()
    before = series(harness, "prefix_cache_skips_total")
    # Both before and after, a request that may read finds its two blocks.
    for name, asked in (("b", {}), ("c", params), ("d", {})):
        harness.add(name, prompt, max_tokens=1, **asked)
        computed = 40 if asked or not caching else 8
        assert harness.row() == (PREFILL, {name: computed})
        harness.finish()
    assert series(harness, "prefix_cache_skips_total") - before == int(caching)


def test_a_preempted_request_counts_its_skip_of_the_cache_once(make_scheduler):
    # As below: `b` gives its blocks to `a`, and is admitted a second time.
    harness = make_scheduler(num_blocks=5, enable_prefix_caching=True)
    before = series(harness, "prefix_cache_skips_total")
    harness.add("a", 30, max_tokens=8)
    b = harness.add("b", 30, max_tokens=8, prompt_logprobs=1)
    harness.finish()
    assert b.num_preemptions == 1
    assert series(harness, "prefix_cache_skips_total") == before + 1


def test_no_step_admits_beyond_max_num_seqs(make_scheduler):
    harness = make_scheduler(max_num_seqs=3)
    for name in "abcde":
        harness.add(name, 4, max_tokens=3)
    assert run(harness, 4) == [
        (PREFILL, {"a": 4, "b": 4, "c": 4}),
        (DECODE, {"a": 1, "b": 1, "c": 1}),
        (DECODE, {"a": 1, "b": 1, "c": 1}),
        (PREFILL, {"d": 4, "e": 4}),
    ]


def test_33_sequences_fill_one_decode_step(make_scheduler):
    harness = make_scheduler(max_num_seqs=33, max_num_batched_tokens=128, num_blocks=128)
    for index in range(33):
        harness.add(f"r{index}", 2, max_tokens=6)
    phases = [harness.row() for _ in range(6)]
    assert [phase for phase, _ in phases] == [PREFILL] * 5 + [DECODE]
    assert len(phases[-1][1]) == 33


def test_prompt_that_finds_no_block_waits_while_decodes_run(make_scheduler):
    # Six usable blocks: `a` holds three (40 tokens), so a prompt of 64 tokens (four blocks) waits for it.
    harness = make_scheduler(num_blocks=7)
    harness.add("a", 40, max_tokens=6)
    harness.row()
    harness.add("b", 64, max_tokens=2)
    assert run(harness, 7) == [
        (NOTHING, {}),
        (DECODE, {"a": 1}),
        (DECODE, {"a": 1}),
        (DECODE, {"a": 1}),
        (DECODE, {"a": 1}),
        (DECODE, {"a": 1}),
        (PREFILL, {"b": 64}),
    ]
    harness.finish()
    harness.check_idle()


def test_preempted_request_comes_back_as_a_prefill_of_prompt_and_output(make_scheduler):
    # Four usable blocks, two requests of 30 tokens in two blocks each. Two decodes fill them; for a third, b
    # gives its blocks to `a`, and computes its 30 + 3 known tokens again when `a` is done.
    harness = make_scheduler(num_blocks=5)
    preempted_before = series(harness, "preemptions_total")
    a = harness.add("a", 30, max_tokens=8)
    b = harness.add("b", 30, max_tokens=8)
    rows = run(harness, 4)
    assert rows == [
        (PREFILL, {"a": 30, "b": 30}),
        (DECODE, {"a": 1, "b": 1}),
        (DECODE, {"a": 1, "b": 1}),
        (DECODE, {"a": 1}),
    ]
    assert b.num_preemptions == 1 and a.num_preemptions == 0
    assert series(harness, "preemptions_total") == preempted_before + 1
    # `a` holds three of the four blocks: 33 tokens and the one that the step added.
    assert (series(harness, "kv_blocks_total"), series(harness, "kv_blocks_free")) == (4, 1)
    resumed = next(row for row in (harness.row() for _ in range(20)) if "b" in row[1])
    assert resumed == (PREFILL, {"b": 33})
    harness.finish()
    assert (a.num_output_tokens, b.num_output_tokens) == (8, 8)
    harness.check_idle()


def test_the_last_admitted_is_preempted_first(make_scheduler):
    harness = make_scheduler(num_blocks=7)
    early = [harness.add(name, 30, max_tokens=8) for name in "ab"]
    run(harness, 2)
    late = harness.add("c", 30, max_tokens=8)
    run(harness, 3)
    assert [request.num_preemptions for request in (*early, late)] == [0, 0, 1]
    harness.finish()
    harness.check_idle()


def test_decodes_advance_even_if_every_admission_fails(make_scheduler, monkeypatch):
    harness = make_scheduler(num_blocks=7)
    harness.add("a", 40, max_tokens=6)
    harness.row()
    harness.add("b", 64, max_tokens=2)
    monkeypatch.setattr(harness.scheduler, "_may_admit", lambda: True)
    assert run(harness, 4) == [(NOTHING, {}), (DECODE, {"a": 1}), (NOTHING, {}), (DECODE, {"a": 1})]


def test_a_decoding_request_set_back_is_prefilled_again(make_scheduler):
    # What vLLM does to a running request whose KV blocks turn out to be invalid.
    harness = make_scheduler()
    harness.add("d", 5, max_tokens=9)
    request = harness.add("a", 20, max_tokens=9)
    run(harness, 2)
    request.num_computed_tokens = 16
    assert run(harness, 2) == [(PREFILL, {"a": 6}), (DECODE, {"d": 1, "a": 1})]


def test_watermark_counts_the_decodes_held_back(make_scheduler):
    # 20 blocks of which a tenth stays free while anything runs: 19 - 16 - 2 = 1 is less than 2.
    harness = make_scheduler(num_blocks=20, watermark=0.1)
    for name in "ab":
        harness.add(name, 128 - 8, max_tokens=8)
    run(harness, 2)
    harness.add("c", 32, max_tokens=2)
    assert run(harness, 2) == [(NOTHING, {}), (DECODE, {"a": 1, "b": 1})]


def test_abort_while_a_long_prompt_is_chunked(make_scheduler):
    harness = make_scheduler(max_num_batched_tokens=32, max_model_len=256)
    harness.add("a", 200, max_tokens=4)
    assert run(harness, 2) == [(PREFILL, {"a": 32}), (PREFILL, {"a": 32})]
    harness.abort("a")
    assert harness.row() == (NOTHING, {})
    harness.check_idle()
    harness.add("b", 10, max_tokens=2)
    assert run(harness, 2) == [(PREFILL, {"b": 10}), (DECODE, {"b": 1})]


def test_abort_of_a_held_back_request(make_scheduler):
    harness = make_scheduler(max_num_batched_tokens=32)
    harness.add("a", 8, max_tokens=9)
    harness.row()
    harness.add("b", 60, max_tokens=2)
    assert harness.row() == (PREFILL, {"b": 32})
    harness.abort("a")
    assert run(harness, 2) == [(PREFILL, {"b": 28}), (DECODE, {"b": 1})]
    harness.finish()
    harness.check_idle()


def test_idle_steps_are_empty_and_harmless(make_scheduler):
    harness = make_scheduler()
    for name in "ab":
        harness.add(name, 5, max_tokens=1)
        assert harness.row() == (PREFILL, {name: 5})
        assert run(harness, 2) == [(NOTHING, {}), (NOTHING, {})]
    harness.check_idle()


def test_priority_policy_admits_the_urgent_first(make_scheduler):
    harness = make_scheduler(scheduling_policy="priority", neuron={"max_prefill_seqs": 1})
    harness.add("low", 4, max_tokens=2, priority=5)
    harness.add("high", 4, max_tokens=2, priority=0)
    assert run(harness, 3) == [(PREFILL, {"high": 4}), (PREFILL, {"low": 4}), (DECODE, {"high": 1, "low": 1})]


def test_asynchronous_steps_follow_the_same_table(make_scheduler):
    harness = make_scheduler(depth=2)
    harness.add("a", 20, max_tokens=3)
    assert run(harness, 3) == [(PREFILL, {"a": 20}), (DECODE, {"a": 1}), (DECODE, {"a": 1})]
    harness.finish()
    assert harness.requests["a"].num_output_tokens == 3
    harness.check_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_without_chunking_a_prompt_waits_for_a_whole_bucket(make_scheduler, depth):
    harness = make_scheduler(enable_chunked_prefill=False, depth=depth)
    harness.add("a", 100, max_tokens=3)
    harness.add("b", 100, max_tokens=3)
    assert run(harness, 3) == [(PREFILL, {"a": 100}), (PREFILL, {"b": 100}), (DECODE, {"a": 1, "b": 1})]


def test_queues_keep_their_order_when_a_step_fails(make_scheduler, monkeypatch):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    harness = make_scheduler()
    harness.add("a", 4)
    harness.row()
    harness.add("b", 4)
    scheduler = harness.scheduler
    limits = (scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens)
    with monkeypatch.context() as patch:
        patch.setattr(AsyncScheduler, "schedule", lambda self, throttle: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.schedule(False)
    assert [request.request_id for request in scheduler.running] == ["a"]
    assert (scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens) == limits
    assert run(harness, 2) == [("prefill", {"b": 4}), ("decode", {"a": 1, "b": 1})]


def test_a_mixed_step_is_an_error(make_scheduler, monkeypatch):
    from vllm_neuron import scheduler as module

    harness = make_scheduler()
    harness.add("a", 4)
    harness.row()
    harness.add("b", 4)
    monkeypatch.setattr(module.NeuronScheduler, "_visible", lambda self, phase: list(self.running))
    monkeypatch.setattr(module.NeuronScheduler, "_set_limits", lambda self, phase, num_held: None)
    monkeypatch.setattr(module.NeuronScheduler, "_choose_phase", lambda self, throttle: module.Phase.DECODE)
    with pytest.raises(module.MixedStepError, match="decode step holds requests of another phase"):
        harness.step()


def test_the_pool_is_reported_free_as_soon_as_the_last_request_ends(make_scheduler):
    harness = make_scheduler()
    for name in "ab":
        harness.add(name, 20, max_tokens=3)
    run(harness, 2)
    total = series(harness, "kv_blocks_total")
    assert series(harness, "kv_blocks_free") < total
    harness.abort("a")
    run(harness, 1)
    assert not harness.scheduler.requests
    # No step follows that could report it.
    assert series(harness, "kv_blocks_free") == total
