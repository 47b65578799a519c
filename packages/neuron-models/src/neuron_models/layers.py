# SPDX-License-Identifier: Apache-2.0
"""Blocks that decoder families share, and what one step hands to attention."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuron_core import ops
from neuron_parallel import (
    MergedColumnParallelLinear,
    ParallelGroup,
    RowParallelLinear,
    replicated_parameter,
)


@dataclass(frozen=True, eq=False)
class PagedContext:
    """Everything attention reads in one step besides its layer's hidden states; T tokens, R requests, W
    blocks each.
    """

    cos: Tensor
    """float32 [T, head_dim / 2]."""
    sin: Tensor
    """float32 [T, head_dim / 2]."""
    positions: Tensor
    """int32 [T], position of the token in its request."""
    slots: Tensor
    """int32 [T], where the token's key and value go; -1 is nowhere."""
    request_rows: Tensor
    """int32 [T], row of ``block_tables``; -1 is padding."""
    block_tables: Tensor
    """int32 [R, W]; -1 is no block."""
    kv: Tensor
    """[num_blocks, kv_heads, block_size, 2 * head_dim], this layer's cache, written in place."""


class RMSNorm(nn.Module):
    """Root mean square norm; with a residual it first adds it and returns the sum too."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = replicated_parameter((size,), dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise the last dim of ``x``, or ``(norm(x + residual), x + residual)`` in one pass over memory."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps)
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the intermediate features split over the group."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        group: ParallelGroup,
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        halves = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, halves, group, bias=bias, dtype=dtype)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group, bias=bias, dtype=dtype)

    def forward(self, x: Tensor, sequence_parallel: bool) -> Tensor:
        """``x [T, hidden] -> [T, hidden]``."""
        activated = ops.silu_mul(self.gate_up_proj(x, sequence_parallel))
        y: Tensor = self.down_proj(activated, sequence_parallel)
        return y
