# SPDX-License-Identifier: Apache-2.0
"""Sampling of the requests whose logits the host edits: those with more than the graph has room for, all if sampling
on the device is off, and all if there are custom logits processors.

The edits are vLLM's own functions, in vLLM's order (grammar, allowed tokens, bad words, minimum length, bias, custom
processors, penalties); the draw is the device's sampler with the device's random numbers, so a request's text does not
depend on where it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties

from neuron_core import ops
from neuron_core.ops.reference import mask_logits
from neuron_core.step import StepInput
from vllm_neuron.runner.processors import CustomProcessors
from vllm_neuron.runner.requests import UNKNOWN, Request, RequestTable


@dataclass(frozen=True, eq=False)
class HostRow:
    """A request whose token the host draws, as it stood when the step was submitted."""

    row: int
    request: Request
    output_ids: list[int]
    """The last may be ``UNKNOWN``: then the step before draws it."""
    earlier_row: int | None = None
    """Row of the step before, if that draws the last of ``output_ids``."""

    @property
    def params(self) -> SamplingParams:
        """How it is sampled."""
        return self.request.sampling

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """The ids of the prompt's tokens: penalties count no embedding."""
        return self.request.prompt_tokens

    def known(self, drawn: Tensor | None) -> list[int]:
        """``output_ids`` with the last of them read from ``drawn [R]``, the tokens of the step before."""
        if self.earlier_row is None or drawn is None:
            return self.output_ids
        return [*self.output_ids[:-1], int(drawn[self.earlier_row])]


def host_rows(
    table: RequestTable, requests: Sequence[Request], rows: Sequence[int], earlier: Sequence[Request]
) -> tuple[HostRow, ...]:
    """The ``rows`` of ``requests``, given the requests of the step before, whose tokens may be in flight."""
    found = []
    row_of = {request: row for row, request in enumerate(earlier)}
    for row in rows:
        request = requests[row]
        output_ids = table.output_ids(request)
        in_flight = bool(output_ids) and output_ids[-1] == UNKNOWN
        earlier_row = row_of[request] if in_flight else None
        found.append(HostRow(row, request, output_ids, earlier_row))
    return tuple(found)


def resample(
    logits: Tensor,
    tokens: Tensor,
    step: StepInput,
    allowed: Tensor,
    rows: Sequence[HostRow],
    drawn: Tensor | None = None,
    processors: CustomProcessors | None = None,
) -> Tensor:
    """``tokens [R]`` with those of ``rows`` drawn anew from their edited ``logits [R, V]``; both stay as they are.

    ``allowed`` int32 ``[R, ceil(V / 32)]`` are the tokens that grammars leave.
    ``drawn`` are the tokens of the step before, where it was in flight when this one was submitted.
    """
    index = torch.tensor([row.row for row in rows])
    outputs = [row.known(drawn) for row in rows]
    temperature = step.temperature[index]
    edited = _edit(mask_logits(logits[index], allowed[index]), rows, outputs, processors)
    if processors is not None and processors.has_invariant:
        edited = edited / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
        edited = torch.where(temperature.unsqueeze(1) > 0, processors.apply_invariant(edited.clone()), edited)
        temperature = (temperature > 0).float()
    limits = (step.top_k[index], step.top_p[index], step.min_p[index])
    return tokens.index_copy(0, index, ops.sample(edited, temperature, *limits, step.uniform[index]))


def _edit(
    logits: Tensor,
    rows: Sequence[HostRow],
    outputs: list[list[int]],
    processors: CustomProcessors | None = None,
) -> Tensor:
    for index, row in enumerate(rows):
        _restrict(logits[index], row.params)
    banned = {index: words for index, row in enumerate(rows) if (words := row.params.bad_words_token_ids)}
    apply_bad_words(logits, banned, outputs)
    for index, row in enumerate(rows):
        _bias(logits[index], row.params, len(outputs[index]))
    if processors is not None:
        processors.update([row.request for row in rows], outputs)
        logits = processors.apply(logits)
    return _penalise(logits, rows, outputs)


def _restrict(logits: Tensor, params: SamplingParams) -> None:
    allowed = params.allowed_token_ids
    if allowed:
        kept = logits[allowed].clone()
        logits.fill_(float("-inf"))
        logits[allowed] = kept


def _bias(logits: Tensor, params: SamplingParams, num_drawn: int) -> None:
    stops = [token for token in params.all_stop_token_ids if 0 <= token < len(logits)]
    if num_drawn < params.min_tokens and stops:
        others = logits.clone()
        others[stops] = float("-inf")
        if (others > float("-inf")).any():  # a grammar may leave nothing but the end
            logits.copy_(others)
    for token_id, bias in (params.logit_bias or {}).items():
        logits[int(token_id)] += bias


def _penalise(logits: Tensor, rows: Sequence[HostRow], outputs: list[list[int]]) -> Tensor:
    params = [row.params for row in rows]
    if all(
        p.repetition_penalty == 1.0 and not p.presence_penalty and not p.frequency_penalty for p in params
    ):
        return logits
    vocab = logits.shape[1]
    longest = max(len(row.prompt_ids) for row in rows)
    prompts = torch.full((len(rows), longest), vocab, dtype=torch.int64)
    for index, row in enumerate(rows):
        prompts[index, : len(row.prompt_ids)] = torch.from_numpy(row.prompt_ids)
    penalised: Tensor = apply_all_penalties(
        logits,
        prompts,
        torch.tensor([p.presence_penalty for p in params]),
        torch.tensor([p.frequency_penalty for p in params]),
        torch.tensor([p.repetition_penalty for p in params]),
        outputs,
    )
    return penalised
