# SPDX-License-Identifier: Apache-2.0
"""Who a subject is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Ability", "SubjectInfo"]

Ability = str
"""``logits`` (whole rows), ``logprobs`` (the likeliest only), ``generate``, ``capture``, ``kv``, ``replace``."""


@dataclass(frozen=True)
class SubjectInfo:
    """Who a subject is; what must agree for a comparison to mean something."""

    kind: str
    """``transformers``, ``server``, ``vllm-neuron``, …"""
    model: str
    revision: str
    """Of the weights: a digest, or a hub's revision."""
    dtype: str
    """``float32``, ``bfloat16``, …, or ``unknown`` for a server."""
    vocab_size: int
    tokenizer: str
    """Digest of what token ids mean, or ``unknown``."""
    abilities: frozenset[Ability] = frozenset()
    parallel: Mapping[str, int] = field(default_factory=dict)
    """Degrees above one by axis, such as ``{"tp": 2}``."""
    cache_dtype: str = "auto"
    """Of the KV cache, if it is not ``dtype``: ``float8_e4m3fn``, …"""
