# SPDX-License-Identifier: Apache-2.0
"""The ops as models call them. Shapes are static; each traces to a few graph nodes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from neuron_core.ops import reference
from neuron_core.ops.library import PANEL


def linear(x: Tensor, weight: Tensor, *, wide: bool = False) -> Tensor:
    """``x [T, K]`` times ``weight`` -> ``[T, N]``, float32 if ``wide`` and otherwise in ``x``'s dtype.

    ``weight`` is ``[N, K]``, or in the packed form that :func:`pack_linear` makes.
    """
    if weight.dim() == 4:
        result: Tensor = torch.ops.neuron.packed_linear(x.contiguous(), weight, weight.shape[0] * PANEL, wide)
        return result
    product = F.linear(x, weight)
    return product.float() if wide else product


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows ``token_ids [T]`` of ``weight`` ``[N, K]`` (or packed, see :func:`linear`) -> ``[T, K]``."""
    if weight.dim() == 4:
        panels, columns = token_ids.long() // PANEL, token_ids.long() % PANEL
        return weight[panels, :, columns, :].flatten(1)
    return F.embedding(token_ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dim of ``x [T, H]`` or ``[T, heads, D]``, in ``x``'s dtype."""
    normed: Tensor = torch.ops.neuron.rms_norm(x, weight, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + x`` and its :func:`rms_norm`; returns ``(normed, summed)``, both ``[T, H]``."""
    normed, summed = torch.ops.neuron.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
    return normed, summed


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of ``query [T, H, D]`` and ``key [T, KH, D]`` with ``cos``, ``sin`` ``[T, D/2]`` float32."""
    op = torch.ops.neuron.rotary
    return op(query, cos, sin), op(key, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up [T, 2I]`` laid out ``[gate | up]`` -> ``[T, I]``."""
    gated: Tensor = torch.ops.neuron.silu_mul(gate_up.contiguous())
    return gated


def kv_write_(
    kv: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    fp8_max: float = 448.0,
) -> None:
    """Write ``key`` and ``value`` ``[T, KH, D]`` to ``slots [T]`` of ``kv [blocks, KH, block_size, 2D]``, in place.

    Slot -1 writes nothing. A cache of float8_e4m3fn, and no other, holds them divided by ``k_scale`` and ``v_scale``
    (float32 ``[1]`` or ``[KH]``) and clamped to ``fp8_max``, at most 448; see :func:`reference.quantized`.
    """
    if kv.dtype == torch.float8_e4m3fn:
        torch.ops.neuron.kv_write_(kv, key, value, slots, k_scale, v_scale, fp8_max)
    else:
        reference.is_scaled(kv, k_scale, v_scale)
        torch.ops.neuron.kv_write_(kv, key, value, slots)


def paged_attention(
    query: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    request_rows: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """See :func:`neuron_core.ops.reference.paged_attention`; tokens of this step must be in the cache already."""
    reference.is_scaled(kv, k_scale, v_scale)
    scales = () if k_scale is None and v_scale is None else (k_scale, v_scale)
    result: Tensor = torch.ops.neuron.paged_attention(
        query, kv, block_tables, request_rows, positions, scale, window, *scales
    )
    return result


def encoder_attention(
    query: Tensor, key: Tensor, value: Tensor, request_rows: Tensor, *, scale: float
) -> Tensor:
    """Each token over all tokens of its text, ``[T, H, D]``; see :func:`reference.encoder_attention`.

    Tokens of a text lie one after another; ``request_rows [T]`` says whose they are, -1 for padding.
    """
    result: Tensor = torch.ops.neuron.encoder_attention(query, key, value, request_rows, scale)
    return result


def greedy(logits: Tensor) -> Tensor:
    """Likeliest token of each row of ``logits [R, V]`` float32 -> int32 ``[R]``."""
    tokens: Tensor = torch.ops.neuron.greedy(logits)
    return tokens


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    allowed: Tensor | None = None,
) -> Tensor:
    """One token per row of ``logits [R, V]`` float32 -> int32 ``[R]``; see :func:`neuron_core.ops.reference.sample`.

    ``allowed`` int32 ``[R, ceil(V / 32)]`` is one bit per token; see :func:`neuron_core.ops.reference.mask_logits`.
    """
    tokens: Tensor = torch.ops.neuron.sample(logits, temperature, top_k, top_p, min_p, uniform, allowed)
    return tokens


def sample_edited(logits: Tensor, *sampling: Tensor) -> Tensor:
    """One token per row of the edited ``logits [R, V]`` float32 -> int32 ``[R]``.

    ``sampling`` are the arguments of :func:`neuron_core.ops.reference.sample_edited` after the first, in order.
    """
    tokens: Tensor = torch.ops.neuron.sample_edited(logits, *sampling)
    return tokens


def count_tokens_(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Add one to ``counts`` int32 ``[S, V]`` at each ``(rows[i], tokens[i])``; row -1 counts nothing."""
    torch.ops.neuron.count_tokens_(counts, rows, tokens)
