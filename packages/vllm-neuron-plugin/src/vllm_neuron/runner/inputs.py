# SPDX-License-Identifier: Apache-2.0
"""From what is scheduled to the tensors of one step, padded to a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput

from neuron_core.graphs.buckets import Bucket, BucketPlan, Phase
from neuron_core.kv.slots import NO_BLOCK, NO_SLOT
from neuron_core.metrics import NeuronMetrics
from neuron_core.step import StepInput
from vllm_neuron.runner.feed import NOTHING, Feed
from vllm_neuron.runner.randomness import uniforms
from vllm_neuron.runner.requests import Request, RequestTable


@dataclass(frozen=True)
class Batch:
    """The requests of one step in row order, and what each of them computes."""

    bucket: Bucket
    requests: tuple[Request, ...]
    num_scheduled: tuple[int, ...]
    starts: NDArray[np.int64]
    """Index of each request's first token on the token axis, and past the last one: ``[requests + 1]``."""
    draws: tuple[bool, ...]
    """Whether the step reaches the end of the request's known tokens, so that its drawn token counts."""

    def count(self, metrics: NeuronMetrics) -> None:
        """Record the step and its padding."""
        metrics.observe_step(
            self.bucket.name,
            padded_seqs=self.bucket.num_seqs - len(self.requests),
            padded_tokens=self.bucket.num_tokens - int(self.starts[-1]),
        )


def make_batch(
    table: RequestTable, plan: BucketPlan, requests: Sequence[Request], counts: Sequence[int]
) -> Batch:
    """Choose the bucket of a step that computes ``counts[i]`` tokens of ``requests[i]``.

    A decode step takes the shortest context that holds the longest of its requests, its new token included.

    Raises:
        UncompiledShapeError: no bucket of the plan holds the step.
    """
    rows = [request.row for request in requests]
    reach = table.num_computed[rows] + np.asarray(counts)
    draws = reach >= table.num_tokens[rows]
    total = sum(counts)
    # One token of each request is a decode step to the graphs, whether the token was drawn or is a prompt's last.
    is_decode = total == len(rows) and not plan.pooling
    bucket = plan.decode(len(rows), int(reach.max())) if is_decode else plan.prefill(total, len(rows))
    starts = np.concatenate(([0], np.cumsum(counts)))
    return Batch(bucket, tuple(requests), tuple(counts), starts, tuple(draws.tolist()))


def scheduled_batch(table: RequestTable, plan: BucketPlan, schedule: SchedulerOutput) -> Batch:
    """The batch of a schedule that has tokens; raises as :func:`make_batch`."""
    requests = [table.requests[request_id] for request_id in schedule.num_scheduled_tokens]
    return make_batch(table, plan, requests, list(schedule.num_scheduled_tokens.values()))


def build(table: RequestTable, batch: Batch, rank: int, feed: Feed = NOTHING) -> StepInput:
    """Tensors of the step; padding tokens have id 0, position 0, slot -1 and row -1, padding rows no blocks.

    Tokens that ``feed`` will supply have id 0 until it does. Raises ``ValueError`` for a scheduled token that
    has no id and no source, or no block.
    """
    bucket, num_requests = batch.bucket, len(batch.requests)
    rows = np.fromiter((request.row for request in batch.requests), np.int64, num_requests)
    counts = np.asarray(batch.num_scheduled)
    total = int(batch.starts[-1])
    owner = np.repeat(np.arange(num_requests), counts)
    offset = np.arange(total) - batch.starts[owner]
    positions = table.num_computed[rows][owner] + offset
    width = bucket.context_len // table.block_size
    tables = np.full((bucket.num_seqs, width), NO_BLOCK, np.int32)
    tables[:num_requests] = table.block_tables[rows, :width]
    blocks = tables[owner, positions // table.block_size].astype(np.int64)
    ids = table.token_ids[rows[owner], positions]
    ids[feed.places] = 0
    if total and (ids.min() < 0 or blocks.min() <= 0):
        raise ValueError(f"a scheduled token has no id or no block: {[r.request_id for r in batch.requests]}")
    places = (batch.starts[1:] - 1) if bucket.phase is Phase.PREFILL else np.arange(num_requests)
    drawn = table.num_computed[rows] + counts  # index of the token that this step draws
    return StepInput(
        token_ids=_padded(ids, bucket.num_tokens, 0),
        positions=_padded(positions, bucket.num_tokens, 0),
        slots=_padded(blocks * table.block_size + positions % table.block_size, bucket.num_tokens, NO_SLOT),
        request_rows=_padded(owner, bucket.num_tokens, -1),
        block_tables=torch.from_numpy(tables),
        sample_rows=_padded(places, bucket.num_seqs, 0),
        temperature=_padded(table.temperature[rows], bucket.num_seqs, 0.0, np.float32),
        top_k=_padded(table.top_k[rows], bucket.num_seqs, 0),
        top_p=_padded(table.top_p[rows], bucket.num_seqs, 1.0, np.float32),
        min_p=_padded(table.min_p[rows], bucket.num_seqs, 0.0, np.float32),
        uniform=_padded(uniforms(table.seed[rows], drawn), bucket.num_seqs, 0.0, np.float32),
        rank=torch.tensor([rank], dtype=torch.int32),
    )


def _padded(
    values: NDArray[np.generic], length: int, fill: float, dtype: type[np.generic] = np.int32
) -> torch.Tensor:
    padded = np.full(length, fill, dtype)
    padded[: len(values)] = values
    return torch.from_numpy(padded)
