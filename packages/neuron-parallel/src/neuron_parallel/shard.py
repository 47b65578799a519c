# SPDX-License-Identifier: Apache-2.0
"""What part of a checkpoint a parameter holds: every weight knows how to shard itself, so a loader knows no
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ShardBlock:
    """One checkpoint tensor's share of a parameter, along the parameter's shard dim.

    ``name`` is the module the checkpoint keeps it under, a sibling of ours (``q_proj`` of ``qkv_proj``), or
    empty when the names agree. ``size`` is the whole extent in the checkpoint. It is cut into ``parts`` equal
    parts, and ``world / parts`` neighbouring ranks hold the same one. ``padded_size`` (0 = ``size``) is the
    extent that is cut, of which the rows past ``size`` are zeros.
    """

    name: str
    size: int
    parts: int
    padded_size: int = 0

    @property
    def local_size(self) -> int:
        """Extent of this block on one rank."""
        return (self.padded_size or self.size) // self.parts

    def span(self, rank: int, world: int) -> tuple[int, int]:
        """Start and stop, in the checkpoint tensor, of what ``rank`` of ``world`` holds; shorter where
        padded.
        """
        start = rank * self.parts // world * self.local_size
        return min(start, self.size), min(start + self.local_size, self.size)


@dataclass(frozen=True)
class Shard:
    """How a parameter is assembled on a rank: blocks one after the other along ``dim``."""

    dim: int
    blocks: tuple[ShardBlock, ...]

    @property
    def local_size(self) -> int:
        """Extent of the parameter along ``dim`` on one rank."""
        return sum(block.local_size for block in self.blocks)


def sharded_parameter(shape: Sequence[int], shard: Shard, dtype: torch.dtype) -> nn.Parameter:
    """An unfilled parameter of the rank's ``shape``, carrying ``shard``. Its pages are not touched until
    filled.
    """
    parameter = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def replicated_parameter(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """An unfilled parameter that every rank holds whole."""
    return sharded_parameter(shape, Shard(0, (ShardBlock("", shape[0], 1),)), dtype)


def shard_of(parameter: nn.Parameter) -> Shard:
    """The shard a parameter carries; a parameter made without one is held whole by every rank."""
    whole = Shard(0, (ShardBlock("", parameter.shape[0], 1),))
    found: Shard = getattr(parameter, "shard", whole)
    return found
