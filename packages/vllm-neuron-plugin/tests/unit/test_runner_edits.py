# SPDX-License-Identifier: Apache-2.0
"""Edits of logits, in the graph and on the host, are what vLLM's own ``Sampler`` does to the same logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from neuron_core import ops
from neuron_core.graphs.buckets import Bucket, Phase
from neuron_core.logit_edits import BAN_SLOTS, EDIT_INPUTS, OUTPUT_COUNTS, STATE_TENSORS
from neuron_core.ops import reference
from neuron_core.sampling_state import SamplingState
from neuron_core.token_mask import allow_everything
from vllm_neuron.runner.edits import StateRows
from vllm_neuron.runner.host_sampling import _edit, host_rows, resample
from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.requests import RequestTable

VOCAB = 23
TOKENS = st.integers(0, VOCAB - 1)


def make_table(requests) -> RequestTable:
    """One row per ``(prompt, output, params)``."""
    table = RequestTable(64, 16, 4, engine_seed=0)
    step = SchedulerOutput.make_empty()
    for index, (prompt, _, params) in enumerate(requests):
        step.scheduled_new_reqs.append(
            NewRequestData(str(index), list(prompt), [], params, None, ([1, 2, 3],), 0, None)
        )
    table.update(step)
    for index, (_, output, _) in enumerate(requests):
        for token in output:
            table.append(table.requests[str(index)], token)
    return table


def edit(logits: torch.Tensor, table: RequestTable) -> torch.Tensor:
    requests = list(table.requests.values())
    rows = host_rows(table, requests, range(len(requests)), earlier=())
    return _edit(logits, rows, [row.known(None) for row in rows])


class InGraph:
    """The graph's side of requests: their state rows, and its edits."""

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self.requests = list(table.requests.values())
        self.state = SamplingState(len(self.requests), VOCAB)
        self.rows = StateRows(len(self.requests))
        for write in self.rows.assign(table, self.requests):
            self.state.write(write.row, write.edits)

    def draw(self, tokens: list[int | None]) -> None:
        """Count a token of each request, as the graph does with those it draws; None draws nothing."""
        drawn = torch.tensor([0 if token is None else token for token in tokens], dtype=torch.int32)
        rows = self._said([token is not None for token in tokens])["state_rows"]
        ops.count_tokens_(self.state.tensors[OUTPUT_COUNTS], rows, drawn)

    def edit(self, logits: torch.Tensor, last: list[int]) -> torch.Tensor:
        """The logits from which the graph draws after the tokens ``last``."""
        said = self._said([True] * len(self.requests))
        return reference.edited_logits(
            logits,
            allow_everything(len(logits), VOCAB),
            torch.tensor(last, dtype=torch.int32),
            *(said[name] for name in EDIT_INPUTS),
            *(self.state.tensors[name] for name in STATE_TENSORS),
        )

    def _said(self, draws: list[bool]) -> dict[str, torch.Tensor]:
        count = len(self.requests)
        bucket = Bucket(Phase.DECODE, count, count, 64)
        ones = (1,) * count
        return self.rows.inputs(
            self.table, Batch(bucket, tuple(self.requests), ones, np.arange(count + 1), tuple(draws))
        )


def vllm_metadata(requests) -> SamplingMetadata:
    """What vLLM's sampler is given for the same requests."""
    prompts, outputs, params = zip(*requests, strict=True)
    update = BatchUpdate(
        batch_size=len(requests),
        removed=[],
        added=[(i, params[i], list(prompts[i]), outputs[i]) for i in range(len(requests))],
        moved=[],
    )
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(requests)))
    processors = LogitsProcessors(
        kind(config, torch.device("cpu"), False)
        for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    )
    for processor in processors.all:
        processor.update_state(update)
    longest = max(map(len, prompts))
    padded = torch.full((len(requests), longest), VOCAB)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    mask = torch.zeros(len(requests), VOCAB, dtype=torch.bool)
    for row, p in enumerate(params):
        if p.allowed_token_ids:
            mask[row] = True
            mask[row, p.allowed_token_ids] = False
    return SamplingMetadata(
        temperature=torch.tensor([p.temperature for p in params]),
        all_greedy=False,
        all_random=False,
        top_p=torch.tensor([p.top_p for p in params]),
        top_k=torch.tensor([p.top_k or VOCAB for p in params]),
        generators={},
        max_num_logprobs=VOCAB,
        no_penalties=False,
        prompt_token_ids=padded,
        frequency_penalties=torch.tensor([p.frequency_penalty for p in params]),
        presence_penalties=torch.tensor([p.presence_penalty for p in params]),
        repetition_penalties=torch.tensor([p.repetition_penalty for p in params]),
        output_token_ids=[list(output) for output in outputs],
        allowed_token_ids_mask=mask,
        bad_words_token_ids={i: p.bad_words_token_ids for i, p in enumerate(params) if p.bad_words_token_ids},
        logitsprocs=processors,
    )


def vllm_edits(logits: torch.Tensor, requests) -> torch.Tensor:
    """The same requests through ``Sampler.apply_logits_processors``."""
    return Sampler().apply_logits_processors(
        logits.clone(), vllm_metadata(requests), predict_bonus_token=False
    )


def vllm_distribution(logits: torch.Tensor, requests) -> torch.Tensor:
    """What vLLM's whole sampler draws from, ``[requests, VOCAB]``: probabilities after every setting."""
    sampler = Sampler(logprobs_mode="processed_logprobs")
    found = sampler(logits.clone(), vllm_metadata(requests)).logprobs_tensors
    ids, logprobs = found.logprob_token_ids[:, 1:].long(), found.logprobs[:, 1:]
    return torch.zeros(len(logits), VOCAB).scatter(1, ids, logprobs.exp())


@st.composite
def sampling(draw) -> SamplingParams:
    allowed = draw(st.none() | st.lists(TOKENS, min_size=1, max_size=6, unique=True))
    params = SamplingParams(
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.6])),
        logit_bias=draw(st.none() | st.dictionaries(TOKENS, st.floats(-5, 5, width=16), max_size=4)),
        allowed_token_ids=allowed,
        min_tokens=draw(st.integers(0, 4)),
        max_tokens=16,
        stop_token_ids=draw(st.lists(TOKENS, max_size=3, unique=True)),
        # Without it vLLM bans stop tokens also where nothing else is left, and draws from no logits at all.
        structured_outputs=StructuredOutputsParams(json_object=True),
        temperature=draw(st.sampled_from([0.0, 0.6, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 4, VOCAB])),
        top_p=draw(st.sampled_from([1.0, 0.83, 0.31])),
        min_p=draw(st.sampled_from([0.0, 0.07, 0.4])),
    )
    params._bad_words_token_ids = draw(
        st.none() | st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=3)
    )
    return params


def some_requests(min_outputs: int = 0):
    """One to four requests: prompt, output and parameters."""
    outputs = st.lists(TOKENS, min_size=min_outputs, max_size=9)
    one = st.tuples(st.lists(TOKENS, min_size=1, max_size=9), outputs, sampling())
    return st.lists(one, min_size=1, max_size=4)


def random_logits(requests, seed: int) -> torch.Tensor:
    return torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.supports("penalties and logit edits", model="any")
@given(some_requests(), st.integers(0, 999))
@settings(max_examples=120, deadline=None)
def test_edits_equal_those_of_vllm(requests, seed):
    logits = random_logits(requests, seed)
    table, expected = make_table(requests), vllm_edits(logits, requests)
    torch.testing.assert_close(edit(logits.clone(), table), expected)
    last = [output[-1] if output else 0 for _, output, _ in requests]
    torch.testing.assert_close(InGraph(table).edit(logits, last), expected)


@given(some_requests(min_outputs=1), st.integers(0, 999))
@settings(max_examples=80, deadline=None)
def test_the_graph_counts_what_it_draws_and_bans_after_a_token_the_host_has_not_read(requests, seed):
    logits = random_logits(requests, seed)
    table = make_table([(prompt, [], params) for prompt, _, params in requests])
    graph = InGraph(table)
    for place in range(max(len(output) for _, output, _ in requests)):
        tokens = [output[place] if place < len(output) else None for _, output, _ in requests]
        graph.draw(tokens)
        for request, token, (_, output, _) in zip(graph.requests, tokens, requests, strict=True):
            if token is not None:
                table.append(request, *([token] if place < len(output) - 1 else []))  # the last is in flight
    found = graph.edit(logits, [output[-1] for _, output, _ in requests])
    torch.testing.assert_close(found, vllm_edits(logits, requests))


@pytest.mark.supports("temperature, top-k, top-p, min-p", model="any")
@given(some_requests(), st.integers(0, 999))
@settings(max_examples=120, deadline=None)
def test_all_settings_together_leave_the_distribution_of_vllms_sampler(requests, seed):
    logits = random_logits(requests, seed)
    edited = InGraph(make_table(requests)).edit(logits, [o[-1] if o else 0 for _, o, _ in requests])
    params = [p for _, _, p in requests]
    limits = (
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
    )
    found, expected = (
        reference.kept_probabilities(edited, *limits).float(),
        vllm_distribution(logits, requests),
    )
    for row, one in enumerate(params):
        if one.temperature == 0.0:
            assert int(reference.greedy(edited)[row]) == int(vllm_edits(logits, requests)[row].argmax())
        else:
            torch.testing.assert_close(found[row], expected[row], atol=1e-5, rtol=1e-4)


def make_step(rows: int) -> SimpleNamespace:
    off = torch.zeros(rows)
    return SimpleNamespace(temperature=off, top_k=off.int(), top_p=off + 1, min_p=off, uniform=off + 0.5)


def test_only_the_rows_asked_for_change_and_the_logits_stay():
    params = SamplingParams(logit_bias={4: 100.0})
    requests = [([1], [], params)] * 3
    table = make_table(requests)
    logits = torch.randn(4, VOCAB)
    before, tokens = logits.clone(), torch.tensor([9, 9, 9, 9], dtype=torch.int32)
    rows = host_rows(table, list(table.requests.values()), [0, 2], earlier=())
    drawn = resample(logits, tokens, make_step(4), allow_everything(4, VOCAB), rows)
    assert drawn.tolist() == [4, 9, 4, 9] and drawn.dtype == torch.int32
    assert torch.equal(logits, before) and tokens.tolist() == [9, 9, 9, 9]


@pytest.mark.parametrize("edited", [False, True])
def test_whether_a_request_is_edited_does_not_depend_on_off_values(edited):
    params = SamplingParams(presence_penalty=0.5) if edited else SamplingParams(temperature=0.3, top_k=3)
    request = make_table([([1, 2], [], params)]).requests["0"]
    assert request.is_edited is edited and not request.on_host


def test_more_banned_words_than_a_step_has_room_for_go_to_the_host():
    fits, spills = SamplingParams(), SamplingParams()
    fits._bad_words_token_ids = [[1, 2]] * BAN_SLOTS + [[3]]
    spills._bad_words_token_ids = [[1, 2]] * (BAN_SLOTS + 1)
    requests = make_table([([1], [], fits), ([1], [], spills)]).requests
    assert not requests["0"].on_host and requests["1"].on_host


def test_a_state_row_is_written_anew_for_who_comes_next_and_after_a_preemption():
    params = SamplingParams(frequency_penalty=1.0)
    table = make_table([([1], [], params), ([2], [5], params), ([3], [], params)])
    first, second, third = table.requests.values()
    rows = StateRows(2)
    assert [write.edits.output_tokens for write in rows.assign(table, [first, second])] == [[], [5]]
    assert rows.assign(table, [first, second]) == ()
    with pytest.raises(ValueError, match="no state row is left for 2"):
        rows.assign(table, [third])
    rows.release({"0": first, "1": second, "2": third}, preempted=["1"])
    assert len(rows.assign(table, [third])) == 1
    rows.release({"1": second, "2": third})
    assert len(rows.assign(table, [second])) == 1


def test_penalties_end_where_the_prompt_of_a_longer_neighbour_goes_on():
    # Padding between prompts of different lengths must not count as a token.
    short = ([2], [], SamplingParams(repetition_penalty=2.0))
    long = (list(range(20)), [], SamplingParams(repetition_penalty=2.0))
    logits = torch.ones(2, VOCAB)
    edited = edit(logits, make_table([short, long]))
    halved = [np.flatnonzero(edited[row].numpy() == 0.5).tolist() for row in range(2)]
    assert halved == [[2], list(range(20))]


@given(some_requests(min_outputs=1), st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_token_in_flight_counts_as_if_it_had_been_read(requests, random):
    logits = torch.randn(len(requests), VOCAB)
    table = make_table([(prompt, output[:-1], params) for prompt, output, params in requests])
    earlier = list(table.requests.values())
    random.shuffle(earlier)
    drawn = torch.tensor([requests[int(request.request_id)][1][-1] for request in earlier])
    for request in earlier:
        table.append(request)
    known = list(table.requests.values())
    rows = host_rows(table, known, range(len(known)), earlier)
    edited = _edit(logits.clone(), rows, [row.known(drawn) for row in rows])
    torch.testing.assert_close(edited, vllm_edits(logits, requests))
