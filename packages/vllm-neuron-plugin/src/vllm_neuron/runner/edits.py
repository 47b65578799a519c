# SPDX-License-Identifier: Apache-2.0
"""Edits of logits inside the graph: what a request's state row is written with, and what each step says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from neuron_core.logit_edits import AFTER_ANY, STATE_ROWS, no_edits
from neuron_core.sampling_state import RowEdits
from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.requests import UNKNOWN, Request, RequestTable


@dataclass(frozen=True)
class StateWrite:
    """A state row that a step writes before it runs."""

    row: int
    edits: RowEdits


class StateRows:
    """Which request owns which of ``num_rows`` state rows."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: dict[Request, int] = {}

    def release(self, kept: Mapping[str, Request], preempted: Sequence[str] = ()) -> None:
        """Free the rows of requests that are not among ``kept``, by id, or that are ``preempted``.

        A preempted request comes back as another object, and its row is written anew then.
        """
        for request in list(self._row_of):
            name = request.request_id
            if kept.get(name) is not request or name in preempted:
                self._free.append(self._row_of.pop(request))

    def assign(self, table: RequestTable, requests: Sequence[Request]) -> tuple[StateWrite, ...]:
        """Give each of ``requests`` that has none a row, and say what to write into it.

        Raises ``ValueError`` if there are more of them than rows.
        """
        writes = []
        for request in requests:
            if request in self._row_of:
                continue
            if not self._free:
                raise ValueError(
                    f"no state row is left for {request.request_id}: {len(self._row_of)} are taken"
                )
            row = self._row_of[request] = self._free.pop()
            writes.append(StateWrite(row, row_edits(request, table.output_ids(request))))
        return tuple(writes)

    def inputs(self, table: RequestTable, batch: Batch) -> dict[str, Tensor]:
        """What the step of ``batch`` says, by the names of `neuron_core.logit_edits`.

        Only rows that draw are edited, and only those whose requests have a state row.
        """
        said = no_edits(batch.bucket.num_seqs)
        for row, (request, draws) in enumerate(zip(batch.requests, batch.draws, strict=True)):
            if draws and request in self._row_of:
                said[STATE_ROWS][row] = self._row_of[request]
                num_drawn = int(table.num_tokens[request.row]) - request.num_prompt_tokens
                said["bans_stop"][row] = num_drawn < request.sampling.min_tokens
                if request.banned_words:
                    bans = banned_ends(request.banned_words, table.output_ids(request))
                    pairs = torch.tensor(bans, dtype=torch.int32).reshape(-1, 2)
                    said["ban_if"][row, : len(bans)], said["ban_then"][row, : len(bans)] = pairs.unbind(1)
        return said


def row_edits(request: Request, output_ids: Sequence[int]) -> RowEdits:
    """The edits that a request's parameters ask for; ``output_ids`` are the tokens that it has drawn."""
    params: SamplingParams = request.sampling
    words = params.bad_words_token_ids or ()
    return RowEdits(
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias={int(token): bias for token, bias in (params.logit_bias or {}).items()},
        banned=[word[0] for word in words if len(word) == 1],
        allowed=params.allowed_token_ids or (),
        stop_tokens=sorted(params.all_stop_token_ids) if params.min_tokens else (),
        prompt_tokens=request.prompt_tokens.tolist(),
        output_tokens=output_ids,
    )


def banned_ends(words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs ``(ban_if, ban_then)``: the last tokens of those ``words`` whose others were drawn before.

    The last of ``output_ids`` may be ``UNKNOWN``; then the token before a word's last decides on the device.
    """
    found = []
    for *before, end in words:
        if len(before) > len(output_ids):
            continue
        drawn = list(output_ids[-len(before) :])
        if drawn == before:
            found.append((AFTER_ANY, end))
        elif drawn[-1] == UNKNOWN and drawn[:-1] == before[:-1]:
            found.append((before[-1], end))
    return found
