# SPDX-License-Identifier: Apache-2.0
"""From the pages that ranks hold to the keys and values of a request, in the order of its positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neuron_accuracy.capture.records import CacheRecord
from neuron_accuracy.errors import LayoutError

__all__ = ["Scales", "block_of", "contiguous", "disagreeing", "disagreeing_scales", "freed_positions"]

Scales = tuple[torch.Tensor, torch.Tensor]
"""``k_scale`` and ``v_scale`` of a rank, float32 ``[local heads]``: stored number times scale is the key or value."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def contiguous(
    record: CacheRecord, pages_by_rank: Sequence[torch.Tensor], scales_by_rank: Sequence[Scales] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer of a request, float32 ``[heads, positions, head_dim]`` each.

    ``pages_by_rank`` are ``[blocks, local heads, block_size, 2 * head_dim]`` in the order of ``record.block_ids``.
    Ranks hold consecutive heads, ``record.replicas`` consecutive ranks the same ones, of which the first is read (see
    :func:`disagreeing`). With ``record.dcp`` ranks of context parallelism, rank r holds positions r % dcp,
    r % dcp + dcp, … of its heads, and a block spans ``block_size * dcp`` positions. Positions of blocks that
    ``record.freed`` says were given back are NaN, and no others are made so. Raises ``LayoutError`` when the shapes do
    not make that cache.
    """
    _check(record, pages_by_rank, scales_by_rank)
    local = pages_by_rank[0].shape[1]
    length, places = len(record.token_ids), len(record.block_ids) * record.block_size * record.dcp
    whole = torch.empty(record.num_heads, places, 2 * record.head_dim)
    for group in range(len(pages_by_rank) // record.replicas):
        heads = slice(group * local, (group + 1) * local)
        for turn in range(record.dcp):
            rank = group * record.replicas + turn
            scales = None if scales_by_rank is None else scales_by_rank[rank]
            whole[heads, turn :: record.dcp] = _rows(pages_by_rank[rank], scales)
    whole = whole[:, :length]
    whole[:, freed_positions(record)] = torch.nan
    keys, values = whole.split(record.head_dim, dim=-1)
    return keys, values


def freed_positions(record: CacheRecord) -> torch.Tensor:
    """Which positions lie in blocks that were given back, bool ``[positions]``."""
    span = record.block_size * record.dcp
    return torch.tensor(record.freed, dtype=torch.bool).repeat_interleave(span)[: len(record.token_ids)]


def block_of(record: CacheRecord, position: int) -> int:
    """The id of the block that holds a position."""
    return record.block_ids[position // (record.block_size * record.dcp)]


def disagreeing(record: CacheRecord, pages_by_rank: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """``(rank, other rank, first such position)`` of ranks that should hold the same numbers and do not.

    Ranks of one replica group are compared bit for bit with the first that holds the same positions; blocks that were
    given back, and places beyond the last position, are not looked at.
    """
    _check(record, pages_by_rank, None)
    found = []
    for rank, pages in enumerate(pages_by_rank):
        first = _first_like(record, rank)
        if rank == first:
            continue
        same = (_bits(pages) == _bits(pages_by_rank[first])).all(dim=-1).all(dim=1).flatten()
        positions = torch.arange(same.numel()) * record.dcp + rank % record.dcp
        inside = positions < len(record.token_ids)
        same[inside] |= freed_positions(record)[positions[inside]]
        if (wrong := positions[~same & inside]).numel():
            found.append((rank, first, int(wrong[0])))
    return found


def disagreeing_scales(record: CacheRecord, scales_by_rank: Sequence[Scales]) -> list[tuple[int, int, str]]:
    """``(rank, other rank, part)`` of ranks as in :func:`disagreeing` whose scales of ``keys`` or ``values`` differ."""
    found = []
    for rank, scales in enumerate(scales_by_rank):
        first = _first_like(record, rank)
        for part, ours, theirs in zip(("keys", "values"), scales, scales_by_rank[first], strict=True):
            if ours.dtype != theirs.dtype or not torch.equal(_bits(ours), _bits(theirs)):
                found.append((rank, first, part))
    return found


def _first_like(record: CacheRecord, rank: int) -> int:
    """The first rank that holds the same heads and positions."""
    return rank // record.replicas * record.replicas + rank % record.dcp


def _rows(pages: torch.Tensor, scales: Scales | None) -> torch.Tensor:
    """``[local heads, places, 2 * head_dim]`` of one rank."""
    blocks, heads, size, width = pages.shape
    rows = pages.float().permute(1, 0, 2, 3).reshape(heads, blocks * size, width)
    if scales is None:
        return rows
    factor = torch.stack([scale.float() for scale in scales], dim=1).repeat_interleave(width // 2, dim=1)
    return rows * factor[:, None]


def _bits(pages: torch.Tensor) -> torch.Tensor:
    return pages.contiguous().view(_INTEGERS[pages.element_size()])


def _check(
    record: CacheRecord, pages_by_rank: Sequence[torch.Tensor], scales_by_rank: Sequence[Scales] | None
) -> None:
    name, ranks = f"cache of request {record.request!r}", len(pages_by_rank)
    if ranks == 0 or record.replicas < 1 or ranks % record.replicas:
        raise LayoutError(f"{name}: {ranks} ranks, of which {record.replicas} hold the same heads each")
    if record.dcp < 1 or record.replicas % record.dcp:
        raise LayoutError(
            f"{name}: dcp={record.dcp} does not divide replicas={record.replicas}, "
            "the ranks that hold the same heads; dcp=1 says that each holds all positions"
        )
    _check_blocks(record, name)
    local, rest = divmod(record.num_heads, ranks // record.replicas)
    expected = (len(record.block_ids), local, record.block_size, 2 * record.head_dim)
    for rank, pages in enumerate(pages_by_rank):
        if rest or tuple(pages.shape) != expected:
            raise LayoutError(
                f"{name}, rank {rank}: pages are {[*pages.shape]}; {ranks} ranks with {record.replicas} replicas "
                f"of {record.num_heads} heads hold [blocks, heads, block_size, 2 * head_dim] = {[*expected]}"
            )
        if scales_by_rank is not None:
            _check_scales(f"{name}, rank {rank}", scales_by_rank[rank], local)


def _check_blocks(record: CacheRecord, name: str) -> None:
    places = len(record.block_ids) * record.block_size * record.dcp
    if len(record.freed) != len(record.block_ids) or places < len(record.token_ids):
        raise LayoutError(
            f"{name}: {len(record.block_ids)} blocks (freed: {len(record.freed)}) of {record.block_size} places on "
            f"{record.dcp} context-parallel ranks do not hold {len(record.token_ids)} positions"
        )


def _check_scales(name: str, scales: Scales, local: int) -> None:
    for scale in scales:
        if tuple(scale.shape) != (local,):
            raise LayoutError(f"{name}: a scale is {[*scale.shape]}; one number per local head is {[local]}")
