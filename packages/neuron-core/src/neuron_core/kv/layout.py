# SPDX-License-Identifier: Apache-2.0
"""How one layer's keys and values lie in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from neuron_core.errors import ConfigError

__all__ = ["KVLayout"]


@dataclass(frozen=True)
class KVLayout:
    """Layout of one layer's cache tensor: ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``.

    Keys are ``[..., :head_dim]`` and values ``[..., head_dim:]``: a token's key and value are adjacent, and
    each layer is one tensor, because the Neuron compiler allows one alias per graph input. ``num_kv_heads``
    counts this rank's heads only. Block 0 is the null block. Raises ``ConfigError`` for a size below 1.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer, keys and values together."""
        return self.num_kv_heads * self.block_size * 2 * self.head_dim * self.dtype.itemsize

    def shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Shape of the cache tensor; ``num_blocks`` counts the null block too."""
        return (num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_dim)

    def allocate(self, num_blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A zero-filled cache tensor; the caller owns it.

        On the host, pages come from the system zeroed and only when a block is first written: a large pool costs
        neither time at start nor memory that no request uses.
        """
        shape = self.shape(num_blocks)
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        pages = np.zeros(math.prod(shape) * self.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(pages).view(self.dtype).view(shape)
