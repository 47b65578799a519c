# SPDX-License-Identifier: Apache-2.0
"""Prompts, or parts of prompts, that are given as embeddings, and the inputs they make of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.core.sched.output import NewRequestData

from neuron_core.prompt_embeds import IS_TOKEN, PROMPT_EMBEDS

if TYPE_CHECKING:
    from vllm_neuron.runner.inputs import Batch

PLACEHOLDER = 0
"""Id that stands where an embedding does."""


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """A prompt of embeddings and tokens, kept as long as its request: after a preemption it is computed anew."""

    rows: Tensor
    """``[n, hidden]``; those at tokens are never read."""
    is_token: NDArray[np.bool_]
    """``[n]``."""

    def __len__(self) -> int:
        return len(self.rows)


def read_prompt(new: NewRequestData) -> tuple[NDArray[np.int32], PromptEmbeds | None]:
    """The prompt's token ids ``[n]``, ``PLACEHOLDER`` where it has none, and its embeddings if it has any.

    Raises ``ValueError`` for a request with neither, or with more of one than of the other.
    """
    given = new.prompt_token_ids
    if new.prompt_embeds is None:
        if given is None:
            raise ValueError(f"request {new.req_id} has neither prompt tokens nor embeddings")
        return np.array(given, np.int32), None
    length = len(new.prompt_embeds)
    mask = new.prompt_is_token_ids
    is_token = np.zeros(length, np.bool_) if mask is None else np.array(mask, np.bool_)
    ids = np.full(length, PLACEHOLDER, np.int32) if given is None else np.array(given, np.int32)
    if not len(ids) == len(is_token) == length or (given is None and is_token.any()):
        raise ValueError(f"request {new.req_id}: prompt tokens and embeddings are not of one prompt")
    # What chat templates put where an embedding goes may lie outside the vocabulary.
    return np.where(is_token, ids, PLACEHOLDER).astype(np.int32), PromptEmbeds(new.prompt_embeds, is_token)


def embedding_inputs(
    batch: Batch, num_computed: NDArray[np.int64], idle: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Both inputs of a step by name, given those of one without embeddings, ``idle``, which stay as they are.

    ``idle`` is empty in an engine that takes none; ``num_computed`` is the table's, by row.
    """
    spans = _spans(batch, num_computed) if idle else ()
    if not spans:
        return idle
    embeds, is_token = idle[PROMPT_EMBEDS].clone(), idle[IS_TOKEN].clone()
    for source, begin, place, count in spans:
        given = torch.from_numpy(~source.is_token[begin : begin + count])
        embeds[place : place + count][given] = source.rows[begin : begin + count][given]
        is_token[place : place + count][given] = 0
    return {PROMPT_EMBEDS: embeds, IS_TOKEN: is_token}


def _spans(batch: Batch, num_computed: NDArray[np.int64]) -> Sequence[tuple[PromptEmbeds, int, int, int]]:
    """``(prompt, first of its rows, place on the token axis, count)`` of each part of a prompt the step computes."""
    found = []
    for index, request in enumerate(batch.requests):
        source, begin = request.embeds, int(num_computed[request.row])
        if source is not None and begin < len(source):
            count = min(batch.num_scheduled[index], len(source) - begin)
            found.append((source, begin, int(batch.starts[index]), count))
    return found
