# SPDX-License-Identifier: Apache-2.0
"""Operators of static-graph language models: schema, PyTorch reference and CPU kernel of each."""

from neuron_core.ops import library, reference
from neuron_core.ops.functional import (
    add_rms_norm,
    count_tokens_,
    embedding,
    encoder_attention,
    greedy,
    kv_write_,
    linear,
    paged_attention,
    rms_norm,
    rotary,
    sample,
    sample_edited,
    silu_mul,
)
from neuron_core.ops.kernels import load_kernels, pin_threads, source_digest
from neuron_core.ops.packing import can_pack, pack_linear, pack_module

__all__ = [
    "add_rms_norm",
    "can_pack",
    "count_tokens_",
    "embedding",
    "encoder_attention",
    "greedy",
    "kv_write_",
    "library",
    "linear",
    "load_kernels",
    "pack_linear",
    "pack_module",
    "paged_attention",
    "pin_threads",
    "reference",
    "rms_norm",
    "rotary",
    "sample",
    "sample_edited",
    "silu_mul",
    "source_digest",
]
