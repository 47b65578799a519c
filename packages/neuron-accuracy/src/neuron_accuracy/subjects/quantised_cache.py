# SPDX-License-Identifier: Apache-2.0
"""A KV cache of transformers that keeps what 8-bit floats keep: the reference of a run with such a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

__all__ = ["CACHE_DTYPES", "QuantisedCache"]

CACHE_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


class QuantisedCache(DynamicCache):
    """Keys and values are clamped to the dtype's range, rounded to it, and read back in the model's own; no scales."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._limit = torch.finfo(dtype).max

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As `DynamicCache` does, with what is left of the new keys and values."""
        kept = (self._kept(key_states), self._kept(value_states))
        result: tuple[Tensor, Tensor] = super().update(*kept, layer_idx, *args, **kwargs)
        return result

    def _kept(self, states: Tensor) -> Tensor:
        return states.clamp(-self._limit, self._limit).to(self._dtype).to(states.dtype)
