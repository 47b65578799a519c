# SPDX-License-Identifier: Apache-2.0
"""Sampling of the requests whose logits have to be edited before a token is drawn: penalties, biases, bans.

The edits are vLLM's own functions, in vLLM's order (allowed tokens, bad words, minimum length, bias, penalties); the
draw is the device's sampler with the device's random numbers, so a request's text does not depend on where it ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties

from neuron_core import ops
from neuron_core.step import StepInput
from vllm_neuron.runner.requests import Request, RequestTable


def resample(
    logits: Tensor,
    tokens: Tensor,
    step: StepInput,
    table: RequestTable,
    requests: Sequence[Request],
    rows: Sequence[int],
) -> Tensor:
    """``tokens [R]`` with those of ``rows`` drawn anew from their edited ``logits [R, V]``; both stay as they are."""
    index = torch.tensor(rows)
    edited = _edit(logits[index].clone(), table, [requests[row] for row in rows])
    drawn = ops.sample(
        edited,
        step.temperature[index],
        step.top_k[index],
        step.top_p[index],
        step.min_p[index],
        step.uniform[index],
    )
    return tokens.index_copy(0, index, drawn)


def _edit(logits: Tensor, table: RequestTable, requests: Sequence[Request]) -> Tensor:
    outputs = [table.output_ids(request) for request in requests]
    for row, request in enumerate(requests):
        _restrict(logits[row], request)
    banned = {row: words for row, r in enumerate(requests) if (words := r.sampling.bad_words_token_ids)}
    apply_bad_words(logits, banned, outputs)
    for row, request in enumerate(requests):
        _bias(logits[row], request, len(outputs[row]))
    return _penalise(logits, table, requests, outputs)


def _restrict(logits: Tensor, request: Request) -> None:
    allowed = request.sampling.allowed_token_ids
    if allowed:
        kept = logits[allowed].clone()
        logits.fill_(float("-inf"))
        logits[allowed] = kept


def _bias(logits: Tensor, request: Request, num_drawn: int) -> None:
    params = request.sampling
    if num_drawn < params.min_tokens and params.all_stop_token_ids:
        logits[list(params.all_stop_token_ids)] = float("-inf")
    for token_id, bias in (params.logit_bias or {}).items():
        logits[int(token_id)] += bias


def _penalise(
    logits: Tensor, table: RequestTable, requests: Sequence[Request], outputs: list[list[int]]
) -> Tensor:
    params = [request.sampling for request in requests]
    if all(
        p.repetition_penalty == 1.0 and not p.presence_penalty and not p.frequency_penalty for p in params
    ):
        return logits
    vocab = logits.shape[1]
    longest = max(request.num_prompt_tokens for request in requests)
    prompts = torch.full((len(requests), longest), vocab, dtype=torch.int64)
    for row, request in enumerate(requests):
        known = table.token_ids[request.row, : request.num_prompt_tokens]
        prompts[row, : request.num_prompt_tokens] = torch.from_numpy(known)
    penalised: Tensor = apply_all_penalties(
        logits,
        prompts,
        torch.tensor([p.presence_penalty for p in params]),
        torch.tensor([p.frequency_penalty for p in params]),
        torch.tensor([p.repetition_penalty for p in params]),
        outputs,
    )
    return penalised
