# SPDX-License-Identifier: Apache-2.0
"""Attention over one layer's paged cache, and the scales of a cache that holds 8-bit floats."""

import torch
from torch import Tensor, nn

from neuron_core import ops
from neuron_core.devices.chips import ChipSpec
from neuron_core.errors import ConfigError
from neuron_models.layers import PagedContext
from neuron_parallel import ParallelGroup, ShardBlock

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite value of `FP8`, where a chip computes with all of it."""


class PagedAttention(nn.Module):
    """Writes a step's keys and values to the cache and attends over it.

    An FP8 cache has two scales, ``k_scale`` and ``v_scale``, float32 ``[local kv heads]`` and 1.0 until they are
    loaded: it holds a key divided by its head's scale and clamped to ``fp8_max``. They are buffers, inputs of the
    graph, so that layers with other scales share it; a scale for all heads is one that each head repeats. A cache
    of the model's own dtype has none. Raises `ConfigError` for a ``kv_dtype`` that is neither.
    """

    k_scale: Tensor | None
    v_scale: Tensor | None

    def __init__(
        self,
        head_dim: int,
        num_kv_heads: int,
        group: ParallelGroup,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kv_dtype not in (None, dtype, FP8):
            raise ConfigError(
                "kv_dtype", kv_dtype, f"is not supported for a {dtype} model; use {dtype} or {FP8}"
            )
        self.scale = head_dim**-0.5
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.is_scaled = kv_dtype == FP8
        self.fp8_max = FP8_MAX
        local_heads = self.heads(group.size).local_size
        for name in ("k_scale", "v_scale"):
            self.register_buffer(name, torch.ones(local_heads) if self.is_scaled else None, persistent=False)

    def heads(self, group_size: int) -> ShardBlock:
        """Which of the model's KV heads a rank holds; beyond their number they repeat."""
        return ShardBlock("", self.num_kv_heads, min(group_size, self.num_kv_heads))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, step: PagedContext) -> Tensor:
        """``query [T, heads, D]``, ``key``, ``value`` ``[T, kv_heads, D]`` -> ``[T, heads, D]``; writes ``step.kv``."""
        k_scale, v_scale = self.k_scale, self.v_scale
        ops.kv_write_(step.kv, key, value, step.slots, k_scale=k_scale, v_scale=v_scale, fp8_max=self.fp8_max)
        return ops.paged_attention(
            query,
            step.kv,
            step.block_tables,
            step.request_rows,
            step.positions,
            scale=self.scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )


def fit_to_chip(model: nn.Module, chip: ChipSpec | None) -> None:
    """Clamp FP8 caches at what ``chip`` computes with; None is the CPU, which takes all of `FP8`.

    Raises `ConfigError` for an FP8 cache on a chip that has none.
    """
    if chip is None or not any(isinstance(m, PagedAttention) and m.is_scaled for m in model.modules()):
        return
    if chip.fp8_max is None:
        raise ConfigError("--kv-cache-dtype", "fp8", f"{chip.name} has no FP8 cache; use auto")
    limit_fp8(model, chip.fp8_max)


def limit_fp8(model: nn.Module, fp8_max: float) -> None:
    """Clamp what ``model`` writes to FP8 caches at ``fp8_max``, the largest E4M3 value of the chip it will run on.

    Call it before scales are loaded and programs are compiled. Raises `ConfigError` unless 0 < ``fp8_max`` <= 448.
    """
    if not 0.0 < fp8_max <= FP8_MAX:
        raise ConfigError("fp8_max", fp8_max, f"must be above 0 and at most {FP8_MAX:g}")
    for module in model.modules():
        if isinstance(module, PagedAttention):
            module.fp8_max = fp8_max
