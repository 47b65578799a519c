# SPDX-License-Identifier: Apache-2.0
"""Reported log-probabilities against plain torch and counting."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_neuron.runner.logprobs import drawn_logprobs, gather, prompt_parts, score_prompts, scores_of


@pytest.mark.supports("logprobs", model="any")
@given(rows=st.integers(1, 6), vocab=st.integers(2, 60), seed=st.integers(0, 999), data=st.data())
@settings(max_examples=60, deadline=None)
def test_gathered_scores_are_those_of_sorting(rows, vocab, seed, data):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=generator).log_softmax(-1)
    chosen = torch.randint(vocab, (rows,), generator=generator)
    count = data.draw(st.integers(0, vocab))
    ids, values, ranks = gather(scores, count, chosen)[:3]
    assert ids.shape == values.shape == (rows, count + 1) and ids.dtype == torch.int32
    for row in range(rows):
        order = sorted(range(vocab), key=lambda token: -float(scores[row, token]))
        assert ids[row].tolist() == [int(chosen[row]), *order[:count]]
        assert values[row].tolist() == [float(scores[row, token]) for token in ids[row].tolist()]
        assert ranks[row] == order.index(int(chosen[row])) + 1


def test_modes():
    logits = torch.randn(3, 7)
    assert torch.equal(scores_of("raw_logits")(logits), logits)
    expected = np.log(
        np.exp(logits.double().numpy()) / np.exp(logits.double().numpy()).sum(-1, keepdims=True)
    )
    np.testing.assert_allclose(scores_of("raw_logprobs")(logits).numpy(), expected, atol=1e-6)


def request(logprobs=None):
    return SimpleNamespace(sampling=SimpleNamespace(logprobs=logprobs))


def test_rows_that_did_not_ask_are_empty_and_aligned():
    logits = torch.randn(4, 9)  # the last row is padding
    tokens = torch.tensor([3, 8, 0, 0], dtype=torch.int32)
    found = drawn_logprobs(logits, tokens, [request(), request(2), request(-1)], scores_of("raw_logprobs"))
    reference = logits.log_softmax(-1)
    assert found.logprobs.shape == (3, 10)
    assert (found.logprobs[0] == 0).all()
    assert found.logprob_token_ids[1, 0] == 8 and found.logprobs[1, 0] == pytest.approx(
        float(reference[1, 8])
    )
    assert found.logprob_token_ids[1, 1:3].tolist() == reference[1].topk(2).indices.tolist()
    assert sorted(found.logprob_token_ids[2, 1:].tolist()) == list(range(9))
    assert found.sampled_token_ranks[1] == (reference[1] >= reference[1, 8]).sum()


def test_nothing_is_computed_when_nobody_asks():
    assert drawn_logprobs(torch.zeros(1, 3), torch.zeros(1), [request()], pytest.fail) is None


@pytest.mark.parametrize("chunks", [[11], [4, 7], [1, 9, 1], [10, 1]])
def test_a_prompt_in_chunks_is_scored_as_in_one(chunks):
    vocab, prompt = 13, [5, 1, 12, 7, 7, 0, 3, 9, 11, 2, 4]
    hidden = torch.randn(len(prompt), vocab)  # the head is the identity
    wanted = SimpleNamespace(
        request_id="a",
        row=0,
        prompt_ids=np.array(prompt, np.int32),
        num_prompt_tokens=len(prompt),
        wants_prompt_logprobs=True,
        prompt_logprobs=None,
        sampling=SimpleNamespace(prompt_logprobs=3),
    )
    parts, at = [], 0
    for count in chunks:  # all are submitted before the first runs
        batch = SimpleNamespace(
            requests=(wanted,),
            num_scheduled=(count,),
            starts=np.array([0, count]),
            draws=(at + count == len(prompt),),
        )
        parts.append((prompt_parts(batch, np.array([at])), hidden[at : at + count]))
        at += count
    assert not wanted.wants_prompt_logprobs
    done = [score_prompts(part, rows, lambda h: h, scores_of("raw_logprobs")) for part, rows in parts]
    assert not any(done[:-1])
    reference = hidden.log_softmax(-1)[:-1]
    found = done[-1]["a"]
    assert found.logprobs.shape == (len(prompt) - 1, 4)
    assert found.logprob_token_ids[:, 0].tolist() == prompt[1:]
    torch.testing.assert_close(
        found.logprobs[:, 0], reference.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    )
    torch.testing.assert_close(found.logprobs[:, 1:], reference.topk(3).values)
