# SPDX-License-Identifier: Apache-2.0
"""The tensors of a step say where each scheduled token is, and padding is what every graph takes for padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from neuron_core.errors import UncompiledShapeError
from neuron_core.graphs.buckets import BucketPlan, Phase
from neuron_core.step import StepInput
from vllm_neuron.runner.feed import make_feed
from vllm_neuron.runner.inputs import build, make_batch
from vllm_neuron.runner.requests import UNKNOWN, RequestTable

BLOCK, LENGTH, SEQS = 16, 96, 8
CONTEXT = 32
PLAN = BucketPlan.from_limits(
    max_model_len=LENGTH,
    max_num_seqs=SEQS,
    max_num_batched_tokens=LENGTH,
    block_size=BLOCK,
    prefill_buckets=[32, LENGTH],
    decode_buckets=[2, SEQS],
    decode_context_length_buckets=[CONTEXT],
    max_prefill_seqs=4,
)


def filled_table(requests) -> RequestTable:
    """One row per ``(num_tokens, num_computed)``; request i's j-th block is ``1 + 10 * i + j``."""
    table = RequestTable(LENGTH, BLOCK, LENGTH // BLOCK, engine_seed=0)
    step = SchedulerOutput.make_empty()
    for index, (length, computed) in enumerate(requests):
        blocks = [1 + 10 * index + j for j in range(-(-length // BLOCK))]
        prompt = [1 + index + 10 * place for place in range(length)]
        params = SamplingParams(temperature=0.25 * (index + 1), top_k=index, seed=index)
        step.scheduled_new_reqs.append(
            NewRequestData(f"r{index}", prompt, [], params, None, (blocks,), computed, None)
        )
    table.update(step)
    return table


@st.composite
def schedules(draw, phase: Phase):
    """Requests ``(num_tokens, num_computed)`` and how many tokens of each a step computes."""
    most = SEQS if phase is Phase.DECODE else PLAN.max_prefill_seqs
    requests, counts, left = [], [], LENGTH
    for _ in range(draw(st.integers(1, most))):
        computed = draw(st.integers(0, LENGTH - 1))
        length = draw(st.integers(computed + 1, LENGTH))
        count = 1 if phase is Phase.DECODE else draw(st.integers(1, length - computed))
        if count > left:
            break
        left -= count
        requests.append((length, computed))
        counts.append(count)
    if phase is Phase.PREFILL and sum(counts) == len(counts):
        requests, counts = [(LENGTH, 0)], [2]
    return requests, counts


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_every_token_is_where_it_belongs_and_the_rest_is_padding(phase, data):
    requests, counts = data.draw(schedules(phase))
    table = filled_table(requests)
    batch = make_batch(table, PLAN, list(table.requests.values()), counts)
    step = build(table, batch, rank=3)
    bucket = batch.bucket
    assert bucket.phase is phase and bucket in PLAN.all()
    assert {n: (tuple(v.shape), v.dtype) for n, v in step.as_values().items()} == StepInput.specs(
        bucket, BLOCK
    )

    at = 0
    for row, ((_, computed), count) in enumerate(zip(requests, counts, strict=True)):
        for place in range(computed, computed + count):
            assert step.token_ids[at] == 1 + row + 10 * place
            assert step.positions[at] == place and step.request_rows[at] == row
            assert step.slots[at] == (1 + 10 * row + place // BLOCK) * BLOCK + place % BLOCK
            at += 1
        assert step.sample_rows[row] == at - 1
        assert batch.draws[row] == (computed + count >= requests[row][0])
        known = min(-(-requests[row][0] // BLOCK), bucket.context_len // BLOCK)
        assert step.block_tables[row, :known].tolist() == [1 + 10 * row + j for j in range(known)]
        assert (step.block_tables[row, known:] == -1).all()
        assert step.temperature[row] == 0.25 * (row + 1) and step.top_k[row] == row
    assert at == sum(counts)

    for name, padding in (("token_ids", 0), ("positions", 0), ("slots", -1), ("request_rows", -1)):
        assert (getattr(step, name)[at:] == padding).all(), name
    empty = slice(len(requests), None)
    for name in ("sample_rows", "temperature", "top_k", "min_p", "uniform"):
        assert (getattr(step, name)[empty] == 0).all(), name
    assert (step.block_tables[empty] == -1).all() and (step.top_p[empty] == 1).all()
    assert step.rank.tolist() == [3]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_negative_id_and_no_shared_slot_reaches_the_graph(data):
    requests, counts = data.draw(schedules(data.draw(st.sampled_from([Phase.PREFILL, Phase.DECODE]))))
    table = filled_table(requests)
    step = build(table, make_batch(table, PLAN, list(table.requests.values()), counts), rank=0)
    written = step.slots[step.slots >= 0]
    assert (step.token_ids >= 0).all() and (step.positions >= 0).all()
    assert len(written.unique()) == len(written) and (written >= BLOCK).all()  # block 0 is nobody's


def test_the_smallest_bucket_that_holds_the_step_is_taken():
    table = filled_table([(40, 0), (40, CONTEXT - 1), (40, CONTEXT)])
    requests = list(table.requests.values())
    assert make_batch(table, PLAN, requests, [1, 1, 1]).bucket.name == "decode_b8_c96"
    # 31 tokens are computed, and the one of this step is the last that fits 32.
    assert make_batch(table, PLAN, requests[:2], [1, 1]).bucket.name == "decode_b2_c32"
    assert make_batch(table, PLAN, requests[2:], [1]).bucket.name == "decode_b2_c96"
    assert make_batch(table, PLAN, requests[:2], [16, 16]).bucket.name == "prefill_s32"
    assert make_batch(table, PLAN, requests[:2], [16, 17]).bucket.name == "prefill_s96"


def test_a_step_beyond_the_plan_is_an_error_with_its_shape():
    table = filled_table([(60, 0)] * 3)
    with pytest.raises(UncompiledShapeError, match="97"):
        make_batch(table, PLAN, list(table.requests.values())[:3], [33, 32, 32])


def test_a_missing_block_is_an_error_and_never_a_write_to_the_null_block():
    table = filled_table([(40, 0)])
    table.block_tables[table.requests["r0"].row, 2] = -1
    batch = make_batch(table, PLAN, list(table.requests.values()), [40])
    with pytest.raises(ValueError, match="r0"):
        build(table, batch, rank=0)


def test_a_placeholder_token_is_an_error():
    table = filled_table([(40, 0)])
    table.token_ids[table.requests["r0"].row, 7] = -1
    batch = make_batch(table, PLAN, list(table.requests.values()), [40])
    with pytest.raises(ValueError, match="r0"):
        build(table, batch, rank=0)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_tokens_in_flight_come_from_their_row_of_the_step_before(data):
    requests, counts = data.draw(schedules(data.draw(st.sampled_from([Phase.PREFILL, Phase.DECODE]))))
    table = filled_table(requests)
    known = list(table.requests.values())
    batch = make_batch(table, PLAN, known, counts)
    whole = build(table, batch, rank=0)
    earlier = data.draw(st.permutations(known))
    drawn = torch.full((data.draw(st.sampled_from([len(known), SEQS])),), 7, dtype=torch.int32)
    for request, draws in zip(known, batch.draws, strict=True):
        if draws and data.draw(st.booleans()):
            last = int(table.num_tokens[request.row]) - 1
            drawn[earlier.index(request)] = int(table.token_ids[request.row, last])
            table.token_ids[request.row, last] = UNKNOWN
    feed = make_feed(table, batch, earlier)
    step = build(table, batch, rank=0, feed=feed)
    total = sum(counts)
    assert (step.token_ids >= 0).all()
    fed, waited = feed.apply(step.token_ids, total, drawn) if feed else (step.token_ids, False)
    assert torch.equal(fed[:total], whole.token_ids[:total])
    if not waited and feed:
        assert fed is drawn  # nothing was copied, let alone read
    if waited:
        assert torch.equal(fed, whole.token_ids)


def test_a_token_in_flight_without_a_source_is_an_error():
    table = filled_table([(40, 39), (20, 19)])
    one, two = table.requests.values()
    table.token_ids[one.row, 39] = UNKNOWN
    batch = make_batch(table, PLAN, [one, two], [1, 1])
    with pytest.raises(ValueError, match="r0"):
        make_feed(table, batch, [two])
    with pytest.raises(ValueError, match="r0"):
        build(table, batch, rank=0)


def test_draws_are_numbered_by_the_place_of_the_token_drawn():
    from vllm_neuron.runner.randomness import uniforms

    table = filled_table([(40, 0), (20, 19)])
    step = build(table, make_batch(table, PLAN, list(table.requests.values()), [40, 1]), rank=0)
    expected = uniforms(np.array([0, 1], np.uint64), np.array([40, 20]))
    assert torch.equal(step.uniform[:2], torch.from_numpy(expected))
