# SPDX-License-Identifier: Apache-2.0
"""What one rank holds of a whole tensor: the way back from `compare.whole.assemble`."""

from __future__ import annotations

import torch
from torch import Tensor

from neuron_accuracy.compare.whole import piece_sizes
from neuron_accuracy.errors import LayoutError
from neuron_accuracy.layout import Sharding, TensorLayout

__all__ = ["part_of"]


def part_of(whole: Tensor, layout: TensorLayout, rank: int, ranks: int) -> Tensor:
    """The part of ``whole`` that ``rank`` of ``ranks`` holds; of a sum rank 0 holds all, the others zeros.

    Raises ``LayoutError`` if it does not divide.
    """
    if layout.sharding is Sharding.PARTIAL:
        return whole if rank == 0 else torch.zeros_like(whole)
    if layout.sharding is Sharding.REPLICATED or ranks == 1:
        return whole
    if layout.sharding is Sharding.INTERLEAVED:
        index: list[slice] = [slice(None)] * whole.dim()
        index[layout.dim] = slice(rank, None, ranks)
        return whole[tuple(index)]
    if layout.slices:
        pieces = []
        sizes = piece_sizes(layout.slices, ranks)
        parts = whole.split([part.size for part in layout.slices], dim=-1)
        for part, size, piece in zip(layout.slices, sizes, parts, strict=True):
            pieces.append(piece.split(size, dim=-1)[rank // part.replicas])
        return torch.cat(pieces, dim=-1)
    extent = whole.shape[layout.dim]
    if extent % ranks:
        raise LayoutError(
            f"dimension {layout.dim} of {list(whole.shape)} does not divide among {ranks} ranks"
        )
    equal: tuple[Tensor, ...] = whole.split(extent // ranks, dim=layout.dim)
    return equal[rank]
