# SPDX-License-Identifier: Apache-2.0
"""Edits of logits: the kernel against the reference, state rows against arithmetic by hand, and the counting op."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuron_core import ops
from neuron_core.logit_edits import AFTER_ANY, EDIT_INPUTS, STATE_TENSORS, no_edits
from neuron_core.ops import reference
from neuron_core.sampling_state import RowEdits, SamplingState
from neuron_core.token_mask import allow_everything

VOCAB = 70
TOKENS = st.integers(0, VOCAB - 1)
MINUS = float("-inf")


pytestmark = pytest.mark.usefixtures("kernels")


@st.composite
def row_edits(draw: st.DrawFn) -> RowEdits:
    return RowEdits(
        repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.75, -1.25])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -0.25])),
        bias=draw(st.dictionaries(TOKENS, st.floats(-5, 5, width=16), max_size=4)),
        banned=draw(st.lists(TOKENS, max_size=3)),
        allowed=draw(st.lists(TOKENS, max_size=5, unique=True)),
        stop_tokens=draw(st.lists(st.integers(-1, VOCAB + 5), max_size=3)),
        prompt_tokens=draw(st.lists(TOKENS, max_size=9)),
        output_tokens=draw(st.lists(TOKENS, max_size=9)),
    )


def edited(
    logits: Tensor, state: SamplingState, said: dict[str, Tensor], last: Tensor, mask: Tensor
) -> Tensor:
    step = [said[name] for name in EDIT_INPUTS]
    return reference.edited_logits(
        logits, mask, last, *step, *(state.tensors[name] for name in STATE_TENSORS)
    )


def by_hand(logits: list[float], edits: RowEdits, bans: set[int], bans_stop: bool) -> list[float]:
    """One row in the plainest words: a list of floats, token by token."""
    row = list(logits)
    for token in range(VOCAB):
        row[token] += edits.bias.get(token, 0.0)
        if token in bans or token in edits.banned or (edits.allowed and token not in edits.allowed):
            row[token] = MINUS
    others = [token for token in range(VOCAB) if row[token] > MINUS and token not in edits.stop_tokens]
    for token in edits.stop_tokens:
        if bans_stop and others and 0 <= token < VOCAB:
            row[token] = MINUS
    for token in range(VOCAB):
        count = list(edits.output_tokens).count(token)
        if count or token in edits.prompt_tokens:
            above = row[token] > 0
            row[token] *= 1 / edits.repetition_penalty if above else edits.repetition_penalty
        row[token] -= edits.frequency_penalty * count + (edits.presence_penalty if count else 0.0)
    return row


@given(
    st.lists(
        st.tuples(row_edits(), st.booleans(), st.lists(st.tuples(TOKENS, TOKENS), max_size=4)),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 999),
)
@settings(max_examples=100, deadline=None)
def test_the_reference_is_the_arithmetic_by_hand_and_the_kernel_draws_from_it(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    count = len(rows) + 1  # the last row has no state row
    logits = torch.randn(count, VOCAB, generator=generator) * 3
    last = torch.randint(VOCAB, (count,), generator=generator, dtype=torch.int32)
    state, said = SamplingState(len(rows) + 2, VOCAB), no_edits(count)
    expected = []
    for row, (edits, bans_stop, pairs) in enumerate(rows):
        place = len(rows) - row  # not the row itself
        state.write(
            place, RowEdits(banned=range(VOCAB), prompt_tokens=range(VOCAB), stop_tokens=range(VOCAB))
        )
        state.write(place, edits)  # nothing is left of the request before
        said["state_rows"][row], said["bans_stop"][row] = place, bans_stop
        bans = set()
        for slot, (before, end) in enumerate(pairs):
            after = int(last[row]) if slot == 1 else AFTER_ANY if slot == 2 else before
            said["ban_if"][row, slot], said["ban_then"][row, slot] = after, end
            if after in (AFTER_ANY, int(last[row])):
                bans.add(end)
        expected.append(by_hand(logits[row].tolist(), edits, bans, bans_stop))
    found = edited(logits, state, said, last, allow_everything(count, VOCAB))
    torch.testing.assert_close(found[:-1], torch.tensor(expected))
    assert torch.equal(found[-1], logits[-1])
    _check_draws(logits, found, state, said, last, generator)


def _check_draws(logits, found, state, said, last, generator):
    """The kernel's tokens are those that it draws from the reference's logits, greedy and at random."""
    count = len(logits)
    for temperature in (0.0, 0.9):
        limits = (
            torch.full((count,), temperature),
            torch.zeros(count, dtype=torch.int32),
            torch.ones(count),
            torch.zeros(count),
            torch.rand(count, generator=generator),
        )
        before = logits.clone()
        step = [said[name] for name in EDIT_INPUTS]
        kept = [state.tensors[name] for name in STATE_TENSORS]
        tokens = ops.sample_edited(logits, *limits, allow_everything(count, VOCAB), last, *step, *kept)
        rows = [row for row in range(count) if (found[row] > MINUS).any()]
        assert torch.equal(tokens[rows], ops.sample(found, *limits)[rows])
        assert torch.equal(logits, before)


def test_a_mask_comes_before_the_edits_and_leaves_a_stop_token_that_nothing_else_is_beside():
    logits = torch.zeros(2, VOCAB)
    state, said, mask = SamplingState(1, VOCAB), no_edits(2), allow_everything(2, VOCAB)
    state.write(0, RowEdits(stop_tokens=[3], bias={5: 100.0}))
    said["state_rows"][0], said["bans_stop"][0] = 0, 1
    mask[:] = 0
    mask[0, 0] = 1 << 3  # a grammar that is at its end
    mask[1, 0] = 1 << 4
    found = edited(logits, state, said, torch.zeros(2, dtype=torch.int32), mask)
    assert (found > MINUS).nonzero().tolist() == [[0, 3], [1, 4]]
    mask[0, 0] |= 1 << 6
    found = edited(logits, state, said, torch.zeros(2, dtype=torch.int32), mask)
    assert (found[0] > MINUS).nonzero().flatten().tolist() == [6]


def test_tokens_are_counted_where_a_row_says_so():
    rows = torch.tensor([2, -1, 0, 2], dtype=torch.int32)
    tokens = torch.tensor([5, 6, 7, 5], dtype=torch.int32)
    counts = torch.zeros(3, VOCAB, dtype=torch.int32)
    functional = torch.ops.neuron.count_tokens(counts, rows, tokens)
    assert counts.count_nonzero() == 0
    ops.count_tokens_(counts, rows, tokens)
    assert torch.equal(counts, functional)
    assert {(r, t): int(counts[r, t]) for r, t in counts.nonzero().tolist()} == {(0, 7): 1, (2, 5): 2}


def test_a_token_outside_the_vocabulary_is_named():
    with pytest.raises(ValueError, match="vocabulary of 70: \\[70\\]"):
        SamplingState(1, VOCAB).write(0, RowEdits(bias={70: 1.0}))
