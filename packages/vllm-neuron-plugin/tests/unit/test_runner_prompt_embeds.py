# SPDX-License-Identifier: Apache-2.0
"""Embeddings from a request to the inputs of its steps: each in its place, once, and again after a preemption."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from neuron_core.graphs.buckets import BucketPlan
from neuron_core.prompt_embeds import IS_TOKEN, PROMPT_EMBEDS
from vllm_neuron.runner.host_sampling import host_rows
from vllm_neuron.runner.inputs import build, make_batch
from vllm_neuron.runner.prompt_embeds import embedding_inputs, read_prompt
from vllm_neuron.runner.requests import RequestTable

WIDTH, BLOCK, LENGTH = 4, 16, 64
PLAN = BucketPlan.from_limits(
    max_model_len=LENGTH, max_num_seqs=4, max_num_batched_tokens=LENGTH, block_size=BLOCK, token_multiple=1
)


def rows(length: int, first: float = 0.0) -> torch.Tensor:
    """Embeddings every number of which is another."""
    return first + torch.arange(1, length * WIDTH + 1, dtype=torch.float32).view(length, WIDTH)


def request(name, *, ids=None, embeds=None, mask=None, computed=0) -> NewRequestData:
    return NewRequestData(
        name,
        ids,
        [],
        SamplingParams(repetition_penalty=1.2),
        None,
        ([1, 2, 3, 4],),
        computed,
        None,
        embeds,
        mask,
    )


def scheduled(new=(), cached=None) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs, step.scheduled_cached_reqs = list(new), cached or CachedRequestData.make_empty()
    return step


def idle(num_tokens: int) -> dict[str, torch.Tensor]:
    return {
        PROMPT_EMBEDS: torch.zeros(num_tokens, WIDTH),
        IS_TOKEN: torch.ones(num_tokens, dtype=torch.int32),
    }


def inputs(table, names, counts):
    batch = make_batch(table, PLAN, [table.requests[name] for name in names], counts)
    step = build(table, batch, 0)
    return batch, step, embedding_inputs(batch, table.num_computed, idle(batch.bucket.num_tokens))


@pytest.fixture
def table() -> RequestTable:
    return RequestTable(LENGTH, BLOCK, LENGTH // BLOCK, engine_seed=0)


def test_prompts_that_do_not_add_up_are_refused():
    bad = [
        {},
        {"embeds": rows(3), "mask": [True, False, False]},
        {"embeds": rows(3), "ids": [1, 2], "mask": [True, True, False]},
        {"embeds": rows(3), "ids": [1, 2, 3], "mask": [True, True]},
    ]
    for parts in bad:
        with pytest.raises(ValueError, match="request x"):
            read_prompt(request("x", **parts))


@given(st.data())
def test_every_step_gets_the_embeddings_of_its_own_tokens(data):
    table = RequestTable(LENGTH, BLOCK, LENGTH // BLOCK, engine_seed=0)
    prompts, names = {}, ["a", "b", "c"][: data.draw(st.integers(1, 3))]
    for number, name in enumerate(names):
        length = data.draw(st.integers(1, 12))
        ids = data.draw(st.lists(st.integers(3, 99), min_size=length, max_size=length))
        kind = data.draw(st.sampled_from(["tokens", "embeds", "mixed"]))
        mask = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
        given_rows = rows(length, 1000.0 * number)
        new = {
            "tokens": request(name, ids=ids),
            "embeds": request(name, embeds=given_rows),
            "mixed": request(name, ids=ids, embeds=given_rows, mask=mask),
        }[kind]
        table.update(scheduled([new]))
        tokens = {"tokens": [True] * length, "embeds": [False] * length, "mixed": mask}[kind]
        prompts[name] = [
            id_ if is_token else row for id_, row, is_token in zip(ids, given_rows, tokens, strict=True)
        ]
    done = dict.fromkeys(names, 0)
    while unfinished := [name for name in names if done[name] < len(prompts[name])]:
        counts = [data.draw(st.integers(1, len(prompts[name]) - done[name])) for name in unfinished]
        for name in unfinished:
            table.num_computed[table.requests[name].row] = done[name]
        _, step, found = inputs(table, unfinished, counts)
        wanted = [
            part
            for name, count in zip(unfinished, counts, strict=True)
            for part in prompts[name][done[name] : done[name] + count]
        ]
        for place, part in enumerate(wanted):
            if isinstance(part, int):
                assert found[IS_TOKEN][place] == 1 and step.token_ids[place] == part
            else:
                assert found[IS_TOKEN][place] == 0 and torch.equal(found[PROMPT_EMBEDS][place], part)
        assert found[IS_TOKEN][len(wanted) :].all()
        for name, count in zip(unfinished, counts, strict=True):
            done[name] += count


def test_rows_at_tokens_are_not_read(table):
    embeds = rows(3)
    embeds[1] = float("nan")
    table.update(scheduled([request("a", ids=[9, 8, 7], embeds=embeds, mask=[False, True, False])]))
    _, _, found = inputs(table, ["a"], [3])
    assert found[PROMPT_EMBEDS].isfinite().all()


def test_a_step_without_embeddings_shares_one_pair_of_tensors(table):
    table.update(scheduled([request("a", embeds=rows(3)), request("b", ids=[5, 6])]))
    batch = make_batch(table, PLAN, [table.requests["b"]], [2])
    nothing = idle(batch.bucket.num_tokens)
    assert embedding_inputs(batch, table.num_computed, nothing) is nothing
    both = make_batch(table, PLAN, [table.requests["b"], table.requests["a"]], [2, 3])
    assert not embedding_inputs(both, table.num_computed, nothing)[IS_TOKEN].all()
    assert nothing[IS_TOKEN].all() and not nothing[PROMPT_EMBEDS].any()
    table.num_computed[table.requests["a"].row] = 3  # past its prompt
    table.append(table.requests["a"], 40)
    batch = make_batch(table, PLAN, [table.requests["a"]], [1])
    assert embedding_inputs(batch, table.num_computed, nothing) is nothing
    # An engine started without them has no such inputs.
    assert embedding_inputs(make_batch(table, PLAN, [table.requests["b"]], [2]), table.num_computed, {}) == {}


def test_a_request_that_was_preempted_has_its_embeddings_again(table):
    table.update(scheduled([request("a", embeds=rows(4))]))
    table.append(table.requests["a"], 40)
    back = CachedRequestData.make_empty()
    back.req_ids, back.num_computed_tokens, back.num_output_tokens = ["a"], [0], [1]
    back.new_block_ids, back.resumed_req_ids = [([5, 6],)], {"a"}
    back.all_token_ids = {"a": [0, 0, 0, 0, 40]}
    table.update(scheduled(cached=back))
    _, step, found = inputs(table, ["a"], [5])
    assert torch.equal(found[PROMPT_EMBEDS][:4], rows(4)) and found[IS_TOKEN][:5].tolist() == [0, 0, 0, 0, 1]
    assert step.token_ids[:5].tolist() == [0, 0, 0, 0, 40]


def test_penalties_count_the_tokens_of_a_prompt_and_no_embedding(table):
    table.update(
        scheduled(
            [
                request("a", ids=[9, 500, 7], embeds=rows(3), mask=[True, False, True]),
                request("b", embeds=rows(2)),
                request("c", ids=[4, 4]),
            ]
        )
    )
    found = host_rows(table, [table.requests[name] for name in "abc"], [0, 1, 2], ())
    assert [row.prompt_ids.tolist() for row in found] == [[9, 7], [], [4, 4]]
    assert np.array_equal(table.token_ids[table.requests["a"].row, :3], [9, 0, 7])
