# SPDX-License-Identifier: Apache-2.0
"""The whole tensor that ranks hold the parts of, under a declared layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from neuron_accuracy.errors import LayoutError
from neuron_accuracy.layout import Sharding, Slice, TensorLayout

__all__ = ["assemble", "differing_replicas", "differs", "piece_sizes", "slice_bounds"]


def assemble(parts: Sequence[Tensor], layout: TensorLayout) -> Tensor:
    """The whole of what ranks 0 to n - 1 hold, in their dtype; a sum of parts is float32, or float64 of float64.

    Raises ``LayoutError`` if the parts do not make one tensor. Which replicas differ, :func:`differing_replicas` says.
    """
    if not parts:
        raise LayoutError("no rank holds a part; one must")
    if layout.slices:
        return _check_heads(_assemble_slices(parts, layout), layout)
    if layout.sharding is Sharding.REPLICATED or len(parts) == 1:
        _check_same_shape(parts, layout)
        return _check_heads(parts[0], layout)
    if layout.sharding is Sharding.PARTIAL:
        _check_same_shape(parts, layout)
        wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
        return _check_heads(torch.stack([part.to(wide) for part in parts]).sum(0), layout)
    dim = _dim(parts, layout)
    if layout.sharding is Sharding.SHARDED:
        return _check_heads(torch.cat(list(parts), dim), layout)
    return _check_heads(_interleave(parts, dim), layout)


def differing_replicas(
    parts: Sequence[Tensor], layout: TensorLayout
) -> list[tuple[int, int, Tensor, Tensor]]:
    """Where ranks that should hold the same do not, bit for bit: ``(rank, first rank of its group, what it holds, what
    that holds)``. NaN equals NaN.
    """
    found = []
    for held in _replica_groups(parts, layout):
        first, reference = held[0]
        found += [(rank, first, part, reference) for rank, part in held[1:] if not _same(part, reference)]
    return found


def differs(first: Tensor, second: Tensor) -> Tensor:
    """Where two tensors of one shape and dtype differ, bool ``[…]``; NaN equals NaN."""
    if first.dtype.is_complex:
        return differs(torch.view_as_real(first), torch.view_as_real(second)).any(-1)
    if not first.is_floating_point():
        return first.long() != second.long()
    wide, other = first.double(), second.double()
    return (wide != other) & ~(wide.isnan() & other.isnan())


def piece_sizes(slices: Sequence[Slice], ranks: int) -> list[int]:
    """Elements of each slice that one rank holds; raises ``LayoutError`` if they do not divide."""
    sizes = []
    for part in slices:
        if part.replicas < 1 or ranks % part.replicas:
            raise LayoutError(
                f"slice {part.name!r}: {part.replicas} replicas do not divide {ranks} ranks; a divisor does"
            )
        pieces = ranks // part.replicas
        if part.size % pieces:
            raise LayoutError(
                f"slice {part.name!r}: {part.size} elements do not divide into {pieces} pieces on {ranks} ranks"
            )
        sizes.append(part.size // pieces)
    return sizes


def slice_bounds(slices: Sequence[Slice]) -> Mapping[str, tuple[int, int]]:
    """Where each slice lies in the whole's last dimension, ``(begin, end)`` by name."""
    bounds, begin = {}, 0
    for part in slices:
        bounds[part.name] = (begin, begin + part.size)
        begin += part.size
    return bounds


def _assemble_slices(parts: Sequence[Tensor], layout: TensorLayout) -> Tensor:
    sharding = layout.sharding
    if sharding in (Sharding.REPLICATED, Sharding.PARTIAL):
        whole = assemble(parts, TensorLayout(sharding))
        _check_width(whole, sum(part.size for part in layout.slices), "the whole tensor")
        return whole
    if sharding is not Sharding.SHARDED or layout.dim not in (-1, parts[0].dim() - 1):
        raise LayoutError(
            f"slices lie along the last dimension, but the tensor is {sharding} along {layout.dim}; "
            "sharded along -1 works"
        )
    sizes = piece_sizes(layout.slices, len(parts))
    _dim(parts, layout)
    for rank, part in enumerate(parts):
        _check_width(part, sum(sizes), f"what rank {rank} holds")
    split = [part.split(sizes, dim=-1) for part in parts]
    pieces = [
        split[rank][index]
        for index, part in enumerate(layout.slices)
        for rank in range(0, len(parts), part.replicas)
    ]
    return torch.cat(pieces, -1)


def _replica_groups(parts: Sequence[Tensor], layout: TensorLayout) -> list[list[tuple[int, Tensor]]]:
    if layout.sharding is Sharding.REPLICATED:
        return [list(enumerate(parts))]
    if not layout.slices or layout.sharding is not Sharding.SHARDED:
        return []
    sizes = piece_sizes(layout.slices, len(parts))
    groups = []
    for index, part in enumerate(layout.slices):
        for first in range(0, len(parts), part.replicas):
            ranks = range(first, first + part.replicas)
            groups.append([(rank, parts[rank].split(sizes, dim=-1)[index]) for rank in ranks])
    return groups


def _interleave(parts: Sequence[Tensor], dim: int) -> Tensor:
    ranks, sizes = len(parts), [part.shape[dim] for part in parts]
    total = sum(sizes)
    dealt = [len(range(rank, total, ranks)) for rank in range(ranks)]
    if sizes != dealt:
        raise LayoutError(
            f"{total} indices of dimension {dim} dealt out to {ranks} ranks in turn are {dealt}, "
            f"but the ranks hold {sizes}"
        )
    shape = list(parts[0].shape)
    shape[dim] = total
    whole = parts[0].new_empty(shape)
    for rank, part in enumerate(parts):
        index = [slice(None)] * whole.dim()
        index[dim] = slice(rank, None, ranks)
        whole[tuple(index)] = part
    return whole


def _dim(parts: Sequence[Tensor], layout: TensorLayout) -> int:
    dims = parts[0].dim()
    if not -dims <= layout.dim < dims:
        raise LayoutError(f"dimension {layout.dim} of {list(parts[0].shape)} does not exist; -1 is the last")
    dim = layout.dim % dims
    for rank, part in enumerate(parts):
        if part.dim() != dims or part.dtype != parts[0].dtype or _but(part, dim) != _but(parts[0], dim):
            raise LayoutError(
                f"rank {rank} holds {part.dtype} {list(part.shape)} and rank 0 {parts[0].dtype} "
                f"{list(parts[0].shape)}: they do not fit along dimension {layout.dim}"
            )
    return dim


def _but(part: Tensor, dim: int) -> list[int]:
    return [size for index, size in enumerate(part.shape) if index != dim]


def _check_same_shape(parts: Sequence[Tensor], layout: TensorLayout) -> None:
    for rank, part in enumerate(parts):
        if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
            raise LayoutError(
                f"rank {rank} holds {part.dtype} {list(part.shape)} and rank 0 {parts[0].dtype} "
                f"{list(parts[0].shape)} of a tensor that is {layout.sharding}; equal shapes work"
            )


def _check_width(part: Tensor, expected: int, what: str) -> None:
    width = part.shape[-1] if part.dim() else 1
    if width != expected:
        raise LayoutError(
            f"{what} has {width} elements in its last dimension, but its slices make {expected}"
        )


def _check_heads(whole: Tensor, layout: TensorLayout) -> Tensor:
    if layout.heads is not None:
        width = whole.shape[-1] if whole.dim() else 1
        if layout.heads < 1 or width % layout.heads:
            raise LayoutError(f"{width} elements in the last dimension do not make {layout.heads} heads")
    return whole


def _same(part: Tensor, reference: Tensor) -> bool:
    return torch.equal(part, reference) or not bool(differs(part, reference).any())
