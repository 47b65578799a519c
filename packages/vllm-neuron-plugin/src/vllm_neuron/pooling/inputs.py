# SPDX-License-Identifier: Apache-2.0
"""The tensors of a step of a model that keeps no cache."""

from __future__ import annotations

import numpy as np
import torch

from neuron_core.step import StepInput
from neuron_models.pooling_program import TYPE_BIT
from vllm_neuron.admission import TYPE_KEY
from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.requests import Request, RequestTable


def build_uncached(table: RequestTable, batch: Batch, rank: int) -> StepInput:
    """As ``runner.inputs.build``, for requests without blocks: only ids, their types, positions and rows say anything.

    Raises ``ValueError`` if a request is not computed whole: what came before would be lost.
    """
    rows = np.fromiter((request.row for request in batch.requests), np.int64, len(batch.requests))
    counts = np.asarray(batch.num_scheduled)
    if table.num_computed[rows].any() or (counts != table.num_tokens[rows]).any():
        parts = [request.request_id for request in batch.requests]
        raise ValueError(f"a model without a cache was given a part of a request: {parts}")
    step = StepInput.padding(batch.bucket, table.block_size, rank)
    total = int(batch.starts[-1])
    owner = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(total) - batch.starts[owner]
    seconds = np.fromiter((_second_text(request) for request in batch.requests), np.int64, len(rows))
    types = (positions >= seconds[owner]).astype(np.int32) << TYPE_BIT
    step.token_ids[:total] = torch.from_numpy(table.token_ids[rows[owner], positions] | types)
    step.positions[:total] = torch.from_numpy(positions)
    step.request_rows[:total] = torch.from_numpy(owner)
    return step


def _second_text(request: Request) -> int:
    """Position of the first token of a pair's second text; past the end if there is none."""
    extra = request.pooling.extra_kwargs if request.pooling is not None else None
    return int((extra or {}).get(TYPE_KEY, request.num_prompt_tokens))
