# SPDX-License-Identifier: Apache-2.0
"""Forms of our ops whose every shape is fixed, for a compiler that knows no other.

Most are the ops' own references; those whose reference picks tokens by a mask are written anew. ``packed_linear`` has
none: packed weights belong to the CPU device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import neuron_core.ops.library  # noqa: F401  defines the ops named below
from neuron_core.ops import reference

__all__ = ["STATIC_FORMS", "kv_write"]


def kv_write(
    kv: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    fp8_max: float = 448.0,
) -> Tensor:
    """``neuron::kv_write`` as one scatter of ``T`` rows; slot -1 writes nothing.

    ``kv [blocks, KH, block_size, 2D]``, ``key``, ``value`` ``[T, KH, D]``, ``slots [T]``. A token without a slot
    repeats the write of the first token that has one, or writes back what slot 0 holds when none has: the same
    row twice in a scatter is harmless, and the cache is read and written only where a token lies.
    """
    block_size, heads = kv.shape[2], kv.shape[1]
    rows = reference.cache_rows(kv, key, value, k_scale, v_scale, fp8_max)
    kept = slots >= 0
    first = kept.int().argmax().unsqueeze(0)
    slot = torch.where(kept, slots, slots.index_select(0, first)).long()
    any_kept = slot >= 0
    slot = slot.clamp(min=0)
    rows = torch.where(kept[:, None, None], rows, rows.index_select(0, first))
    rows = torch.where(any_kept[:, None, None], rows, kv[0, :, 0].unsqueeze(0))
    block, offset = slot // block_size, slot % block_size
    head = torch.arange(heads, device=kv.device)
    return kv.index_put((block[:, None], head[None, :], offset[:, None]), rows)


STATIC_FORMS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.neuron.kv_write.default: kv_write,
    torch.ops.neuron.rms_norm.default: reference.rms_norm,
    torch.ops.neuron.add_rms_norm.default: reference.add_rms_norm,
    torch.ops.neuron.rotary.default: reference.rotary,
    torch.ops.neuron.silu_mul.default: reference.silu_mul,
    torch.ops.neuron.paged_attention.default: reference.paged_attention,
    torch.ops.neuron.encoder_attention.default: reference.encoder_attention,
    torch.ops.neuron.greedy.default: reference.greedy,
    torch.ops.neuron.sample.default: reference.sample,
    torch.ops.neuron.sample_edited.default: reference.sample_edited,
    torch.ops.neuron.count_tokens.default: reference.count_tokens,
}
"""By operator overload."""
