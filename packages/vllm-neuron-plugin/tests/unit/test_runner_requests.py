# SPDX-License-Identifier: Apache-2.0
"""The request table follows what the scheduler says: rows, tokens and blocks of each request, and nothing left over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_neuron.runner.requests import RequestTable

BLOCK, LENGTH = 16, 128
WIDTH = LENGTH // BLOCK


def schedule(new=(), cached=None, finished=(), counts=None) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = list(new)
    step.scheduled_cached_reqs = cached or CachedRequestData.make_empty()
    step.finished_req_ids = set(finished)
    step.num_scheduled_tokens = counts or {}
    step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
    return step


def new_request(name, prompt, blocks, computed=0, **params) -> NewRequestData:
    return NewRequestData(
        name, list(prompt), [], SamplingParams(**params), None, (list(blocks),), computed, None
    )


def cached(**requests) -> CachedRequestData:
    """``name=(computed, new blocks or None, tokens if resumed)``."""
    data = CachedRequestData.make_empty()
    for name, (computed, blocks, resumed) in requests.items():
        data.req_ids.append(name)
        data.num_computed_tokens.append(computed)
        data.new_block_ids.append(None if blocks is None else (blocks,))
        data.num_output_tokens.append(0)
        if resumed:
            data.resumed_req_ids.add(name)
            data.all_token_ids[name] = list(resumed)
    return data


@pytest.fixture
def table() -> RequestTable:
    return RequestTable(LENGTH, BLOCK, WIDTH, engine_seed=0)


def blocks_of(table: RequestTable, name: str) -> list[int]:
    row = table.block_tables[table.requests[name].row]
    used = row[row != -1].tolist()
    assert row.tolist() == used + [-1] * (WIDTH - len(used))
    return used


def test_a_request_from_first_step_to_last(table):
    table.update(
        schedule([new_request("a", [5, 6, 7], [4], temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=11)])
    )
    row = table.requests["a"].row
    assert table.token_ids[row, :3].tolist() == [5, 6, 7] and table.num_tokens[row] == 3
    sampling = (table.temperature, table.top_k, table.top_p, table.min_p, table.seed)
    assert [column[row] for column in sampling] == pytest.approx([0.5, 3, 0.9, 0.1, 11])
    table.append(table.requests["a"], 99)
    table.update(schedule(cached=cached(a=(3, [9], None))))
    assert (table.output_ids(table.requests["a"]), table.num_computed[row], blocks_of(table, "a")) == (
        [99],
        3,
        [4, 9],
    )
    table.update(schedule(finished=["a"]))
    assert not table.requests


@pytest.mark.parametrize("top_k", [2**31 - 1, 2**31, 2**63 - 1])
def test_a_limit_beyond_any_vocabulary_is_one(table, top_k):
    table.update(schedule([new_request("a", [5], [4], top_k=top_k)]))
    assert table.top_k[table.requests["a"].row] == 2**31 - 1


def test_resuming_replaces_the_blocks_and_keeps_the_tokens(table):
    table.update(schedule([new_request("a", range(20), [4, 5])]))
    table.append(table.requests["a"], 99)
    table.update(schedule(cached=cached(a=(0, [7, 8], [*range(20), 99]))))
    assert blocks_of(table, "a") == [7, 8]
    assert table.output_ids(table.requests["a"]) == [99] and table.num_computed[table.requests["a"].row] == 0


def test_resuming_forgets_a_token_that_the_scheduler_dropped(table):
    table.update(schedule([new_request("a", range(20), [4, 5])]))
    for token in (99, 98):
        table.append(table.requests["a"], token)
    table.update(schedule(cached=cached(a=(0, [7, 8], [*range(20), 99]))))
    assert table.output_ids(table.requests["a"]) == [99]


def test_an_id_that_ends_and_returns_in_one_step_is_a_new_request(table):
    table.update(schedule([new_request("a", [5, 6, 7], [4])]))
    table.append(table.requests["a"], 99)
    table.update(schedule([new_request("a", [8], [2])], finished=["a"]))
    assert table.output_ids(table.requests["a"]) == [] and blocks_of(table, "a") == [2]
    assert table.num_tokens[table.requests["a"].row] == 1


def test_a_prefix_hit_starts_past_the_tokens_it_covers(table):
    table.update(schedule([new_request("a", range(40), [4, 5, 6], computed=32)]))
    assert table.num_computed[table.requests["a"].row] == 32


def test_the_last_token_of_a_full_row_has_no_place(table):
    table.update(schedule([new_request("a", [3] * (LENGTH - 1), range(1, WIDTH + 1))]))
    for token in (7, 8):
        table.append(table.requests["a"], token)
    assert table.output_ids(table.requests["a"]) == [7]


@pytest.mark.parametrize(("given", "kept"), [(0.0, 0.0), (0.001, 0.01), (0.02, 0.02)])
def test_only_greedy_temperatures_are_zero(table, given, kept):
    table.update(schedule([new_request("a", [3], [1], temperature=given)]))
    assert table.temperature[table.requests["a"].row] == pytest.approx(kept)


def test_seeds_of_any_integer_fit(table):
    table.update(schedule([new_request(str(seed), [3], [1], seed=seed) for seed in (0, 2**63 - 1, -2)]))
    assert [int(table.seed[table.requests[str(s)].row]) for s in (0, 2**63 - 1, -2)] == [
        0,
        2**63 - 1,
        2**64 - 2,
    ]


def test_off_values_of_top_k_are_zero(table):
    table.update(schedule([new_request(str(k), [3], [1], top_k=k) for k in (-1, 0, 5)]))
    assert [int(table.top_k[table.requests[str(k)].row]) for k in (-1, 0, 5)] == [0, 0, 5]


class TableAgainstLists(RuleBasedStateMachine):
    """Any sequence of arrivals, steps, preemptions and ends leaves the table as plain Python lists would be."""

    @initialize()
    def start(self) -> None:
        self.table = RequestTable(LENGTH, BLOCK, WIDTH, engine_seed=0)
        self.model: dict[str, tuple[list[int], list[int]]] = {}  # tokens, blocks
        self.count = 0

    @rule(length=st.integers(1, LENGTH - 1), block=st.integers(1, 900))
    def arrive(self, length: int, block: int) -> None:
        name = f"r{self.count}"
        self.count += 1
        tokens = [(self.count + i) % 250 for i in range(length)]
        blocks = list(range(block, block + -(-length // BLOCK)))
        self.model[name] = (tokens, blocks)
        self.table.update(schedule([new_request(name, tokens, blocks)]))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), token=st.integers(0, 250), resumed=st.booleans())
    def go_on(self, data: st.DataObject, token: int, resumed: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        tokens, blocks = self.model[name]
        if len(tokens) == LENGTH:
            return
        self.table.append(self.table.requests[name], token)
        tokens.append(token)
        wanted = -(-len(tokens) // BLOCK)
        given = [700 + i for i in range(wanted)] if resumed else list(range(800, 800 + wanted - len(blocks)))
        self.model[name] = (tokens, given if resumed else blocks + given)
        self.table.update(
            schedule(cached=cached(**{name: (len(tokens) - 1, given or None, tokens if resumed else None)}))
        )

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        names = data.draw(st.sets(st.sampled_from(sorted(self.model)), min_size=1))
        for name in names:
            del self.model[name]
        self.table.update(schedule(finished=names))

    @invariant()
    def same(self) -> None:
        assert self.table.requests.keys() == self.model.keys()
        rows = [request.row for request in self.table.requests.values()]
        assert len(set(rows)) == len(rows) and all(row < len(self.table.token_ids) for row in rows)
        for name, (tokens, blocks) in self.model.items():
            row = self.table.requests[name].row
            assert self.table.token_ids[row, : self.table.num_tokens[row]].tolist() == tokens
            assert blocks_of(self.table, name) == blocks
        assert np.all(self.table.token_ids >= 0)


TableAgainstLists.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTableAgainstLists = TableAgainstLists.TestCase
