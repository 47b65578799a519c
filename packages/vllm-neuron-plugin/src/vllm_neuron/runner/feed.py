# SPDX-License-Identifier: Apache-2.0
"""Token ids that the host does not know yet: they go from one step to the next on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_neuron.runner.requests import UNKNOWN, Request, RequestTable

if TYPE_CHECKING:
    from vllm_neuron.runner.inputs import Batch

_NONE: NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Feed:
    """Which tokens of a step are those that the step before it draws."""

    places: NDArray[np.int64]
    """Where they go: indices into the step's token axis, ascending."""
    rows: NDArray[np.int64]
    """Which they are: rows of the earlier step."""

    def __bool__(self) -> bool:
        return len(self.places) > 0

    def apply(self, token_ids: Tensor, num_tokens: int, drawn: Tensor) -> tuple[Tensor, bool]:
        """``token_ids [T]`` with the drawn ones in their places, and whether the host had to wait for them.

        Where the step's ``num_tokens`` tokens are those of the earlier step row for row, ``drawn [R]`` itself is
        the input and stays on the device; what it holds for padding rows is read by nobody. Otherwise it is read
        and merged.
        """
        every = np.arange(num_tokens)
        same = np.array_equal(self.places, every) and np.array_equal(self.rows, every)
        if same and drawn.shape == token_ids.shape and drawn.dtype == token_ids.dtype:
            return drawn, False
        merged = token_ids.clone()
        merged[torch.from_numpy(self.places)] = drawn.to(merged.device)[torch.from_numpy(self.rows)].to(
            merged.dtype
        )
        return merged, True


NOTHING = Feed(_NONE, _NONE)


def make_feed(table: RequestTable, batch: Batch, earlier: Sequence[Request]) -> Feed:
    """What ``batch`` takes from the step of the requests ``earlier``, which is still in flight.

    Only a request's last token can be in flight, and only from the step before. Raises ``ValueError`` naming the
    requests whose token has no source.
    """
    rows = np.fromiter((request.row for request in batch.requests), np.int64, len(batch.requests))
    in_flight = table.token_ids[rows, table.num_tokens[rows] - 1] == UNKNOWN
    unknown = np.flatnonzero(in_flight & np.array(batch.draws))
    if not len(unknown):
        return NOTHING
    row_of = {request: row for row, request in enumerate(earlier)}
    sources = [row_of.get(batch.requests[index], -1) for index in unknown]
    if min(sources) < 0:
        lost = [batch.requests[i].request_id for i, row in zip(unknown, sources, strict=True) if row < 0]
        raise ValueError(f"the last token of {lost} is in flight, and not in the step before")
    return Feed(batch.starts[1:][unknown] - 1, np.array(sources, np.int64))
