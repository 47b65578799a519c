# SPDX-License-Identifier: Apache-2.0
"""How the tensors that ranks hold make one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from neuron_accuracy.errors import LayoutError

__all__ = ["Rows", "Sharding", "Slice", "TensorLayout"]


class Rows(StrEnum):
    """What dimension 0 of the whole tensor counts."""

    TOKENS = "tokens"
    """The tokens of the step, padding included."""
    REQUESTS = "requests"
    """The rows of the step's requests, padding included."""
    NONE = "none"
    """Neither: the tensor is compared as it is."""


class Sharding(StrEnum):
    """How a tensor is spread over ranks."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    SHARDED = "sharded"
    """Ranks hold consecutive pieces of dimension ``dim``."""
    INTERLEAVED = "interleaved"
    """Rank r of n holds indices r, r + n, r + 2n, … of dimension ``dim``, as context parallelism deals tokens out."""
    PARTIAL = "partial"
    """Ranks hold summands."""


@dataclass(frozen=True)
class Slice:
    """A named part of a fused tensor along its last dimension, such as the query of a fused projection."""

    name: str
    size: int
    """Elements of the whole model's tensor."""
    replicas: int = 1
    """How many consecutive ranks hold the same piece: fewer KV heads than ranks."""


@dataclass(frozen=True)
class TensorLayout:
    """The layout of one captured tensor.

    With ``slices`` each rank holds its piece of every slice, concatenated along the last dimension, and the whole is
    each slice whole, concatenated in order. ``heads`` says that the last dimension of the whole is that many heads, so
    that a divergence can be told per head.
    """

    sharding: Sharding = Sharding.REPLICATED
    dim: int = -1
    rows: Rows = Rows.TOKENS
    slices: tuple[Slice, ...] = ()
    heads: int | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        slices = [[part.name, part.size, part.replicas] for part in self.slices]
        return {
            "sharding": str(self.sharding),
            "dim": self.dim,
            "rows": str(self.rows),
            "slices": slices,
            "heads": self.heads,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorLayout:
        """The layout ``to_json`` described; raises ``LayoutError`` when it did not."""
        try:
            slices = tuple(
                Slice(str(name), int(size), int(replicas)) for name, size, replicas in data["slices"]
            )
            sharding, rows = Sharding(data["sharding"]), Rows(data["rows"])
            return cls(sharding, int(data["dim"]), rows, slices, data["heads"])
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"no layout of a tensor: {data!r} ({error!r})") from error
