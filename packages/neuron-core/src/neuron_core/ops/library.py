# SPDX-License-Identifier: Apache-2.0
"""Schemas of the `neuron` ops, their shapes for tracing, and their PyTorch fallbacks.

An op whose name ends in ``_`` changes its first argument; the same name without it is its functional twin. The CPU
device's kernels take precedence over the fallbacks once :func:`neuron_core.ops.load_kernels` has loaded them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neuron_core.ops import reference

PANEL = 32
"""Columns of one panel of a packed weight."""

_registry: Any = torch.library  # not annotated
_library = _registry.Library("neuron", "FRAGMENT")


def _define(schema: str, fallback: Callable[..., object], shape: Callable[..., object]) -> None:
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, fallback, "CompositeExplicitAutograd")
    _registry.register_fake(f"neuron::{name}", shape, lib=_library)


def unpack(weight: Tensor) -> Tensor:
    """The plain ``[N, K]`` form of a packed ``[N/32, K/2, 32, 2]`` or ``[N/32, K, 32, 1]`` weight."""
    panels, groups, columns, together = weight.shape
    return weight.permute(0, 2, 1, 3).reshape(panels * columns, groups * together)


def _packed_linear(x: Tensor, weight: Tensor, columns: int, wide: bool) -> Tensor:
    if wide:
        return reference.linear(x.float(), unpack(weight)[:columns].float())
    return reference.linear(x, unpack(weight)[:columns])


def _packed_linear_shape(x: Tensor, weight: Tensor, columns: int, wide: bool) -> Tensor:
    return x.new_empty((x.shape[0], columns), dtype=torch.float32 if wide else x.dtype)


def _kv_write_(kv: Tensor, key: Tensor, value: Tensor, slots: Tensor, *scaling: Any) -> None:
    kv.copy_(reference.kv_write(kv, key, value, slots, *scaling))


def _count_tokens_(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    counts.copy_(reference.count_tokens(counts, rows, tokens))


def _no_shape(*_: object) -> None:
    return None


def _like_first(first: Tensor, *_: object) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _one_per_row(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)


def _like_both(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _like_first(x), _like_first(x)


def _half_width(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


_define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", reference.rms_norm, _like_first)
_define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference.add_rms_norm,
    _like_both,
)
_define("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", reference.rotary, _like_first)
_define("silu_mul(Tensor gate_up) -> Tensor", reference.silu_mul, _half_width)
_define(
    "packed_linear(Tensor x, Tensor weight, int columns, bool wide) -> Tensor",
    _packed_linear,
    _packed_linear_shape,
)
_define(
    "kv_write_(Tensor(a!) kv, Tensor key, Tensor value, Tensor slots, Tensor? k_scale=None, Tensor? v_scale=None,"
    " float fp8_max=448.0) -> ()",
    _kv_write_,
    _no_shape,
)
_define(
    "kv_write(Tensor kv, Tensor key, Tensor value, Tensor slots, Tensor? k_scale=None, Tensor? v_scale=None,"
    " float fp8_max=448.0) -> Tensor",
    reference.kv_write,
    _like_first,
)
_define(
    "paged_attention(Tensor query, Tensor kv, Tensor block_tables, Tensor request_rows, Tensor positions,"
    " float scale, int window, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor",
    reference.paged_attention,
    _like_first,
)
_define(
    "encoder_attention(Tensor query, Tensor key, Tensor value, Tensor request_rows, float scale) -> Tensor",
    reference.encoder_attention,
    _like_first,
)
_define("greedy(Tensor logits) -> Tensor", reference.greedy, _one_per_row)
_define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform,"
    " Tensor? allowed=None) -> Tensor",
    reference.sample,
    _one_per_row,
)
_define(
    "sample_edited(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform,"
    " Tensor allowed, Tensor last_tokens, Tensor state_rows, Tensor bans_stop, Tensor ban_if, Tensor ban_then,"
    " Tensor penalties, Tensor bias, Tensor prompt_tokens, Tensor stop_tokens, Tensor output_counts) -> Tensor",
    reference.sample_edited,
    _one_per_row,
)
_define("count_tokens_(Tensor(a!) counts, Tensor rows, Tensor tokens) -> ()", _count_tokens_, _no_shape)
_define(
    "count_tokens(Tensor counts, Tensor rows, Tensor tokens) -> Tensor", reference.count_tokens, _like_first
)
