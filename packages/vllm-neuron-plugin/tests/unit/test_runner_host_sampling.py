# SPDX-License-Identifier: Apache-2.0
"""Edits of logits on the host are what vLLM's own ``Sampler`` does to the same logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from neuron_core.token_mask import allow_everything
from vllm_neuron.runner.host_sampling import _edit, host_rows, resample
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


def vllm_edits(logits: torch.Tensor, requests) -> torch.Tensor:
    """The same requests through ``Sampler.apply_logits_processors``."""
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
        for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor)
    )
    for processor in processors.non_argmax_invariant:
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
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
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
    return Sampler().apply_logits_processors(logits.clone(), metadata, predict_bonus_token=False)


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
    )
    params._bad_words_token_ids = draw(
        st.none() | st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=3)
    )
    return params


@pytest.mark.supports("penalties and logit edits", model="any")
@given(
    st.lists(
        st.tuples(st.lists(TOKENS, min_size=1, max_size=9), st.lists(TOKENS, max_size=9), sampling()),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 999),
)
@settings(max_examples=150, deadline=None)
def test_edits_equal_those_of_vllm(requests, seed):
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    edited = edit(logits.clone(), make_table(requests))
    torch.testing.assert_close(edited, vllm_edits(logits, requests))


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


@pytest.mark.parametrize("on_host", [False, True])
def test_whether_a_request_needs_the_host_does_not_depend_on_off_values(on_host):
    params = (
        SamplingParams(presence_penalty=0.5)
        if on_host
        else SamplingParams(temperature=0.3, top_k=3, min_p=0.1)
    )
    table = make_table([([1, 2], [], params)])
    assert table.requests["0"].on_host is on_host


def test_penalties_end_where_the_prompt_of_a_longer_neighbour_goes_on():
    # Padding between prompts of different lengths must not count as a token.
    short = ([2], [], SamplingParams(repetition_penalty=2.0))
    long = (list(range(20)), [], SamplingParams(repetition_penalty=2.0))
    logits = torch.ones(2, VOCAB)
    edited = edit(logits, make_table([short, long]))
    halved = [np.flatnonzero(edited[row].numpy() == 0.5).tolist() for row in range(2)]
    assert halved == [[2], list(range(20))]


@given(
    st.lists(
        st.tuples(
            st.lists(TOKENS, min_size=1, max_size=9), st.lists(TOKENS, min_size=1, max_size=9), sampling()
        ),
        min_size=2,
        max_size=4,
    ),
    st.randoms(),
)
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
