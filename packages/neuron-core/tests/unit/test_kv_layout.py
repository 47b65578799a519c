# SPDX-License-Identifier: Apache-2.0
"""A layer's cache tensor has the bytes and the place of keys and values that its layout says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuron_core.errors import ConfigError
from neuron_core.kv.layout import KVLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@given(
    heads=st.integers(1, 8),
    head_dim=st.integers(1, 32),
    block_size=st.integers(1, 32),
    dtype=st.sampled_from(DTYPES),
    blocks=st.integers(1, 9),
)
def test_block_bytes_is_what_torch_allocates(
    heads: int, head_dim: int, block_size: int, dtype: torch.dtype, blocks: int
) -> None:
    layout = KVLayout(heads, head_dim, block_size, dtype)
    cache = layout.allocate(blocks)
    assert cache.untyped_storage().nbytes() == blocks * layout.block_bytes
    assert cache.dtype == dtype and cache.is_contiguous()
    assert not cache.float().any()


def test_shape_puts_keys_before_values() -> None:
    assert KVLayout(3, 64, 16, torch.bfloat16).shape(10) == (10, 3, 16, 128)


@pytest.mark.parametrize("field", ["num_kv_heads", "head_dim", "block_size"])
def test_sizes_below_one_are_refused(field: str) -> None:
    sizes = {"num_kv_heads": 1, "head_dim": 1, "block_size": 1} | {field: 0}
    with pytest.raises(ConfigError, match=f"{field}=0"):
        KVLayout(**sizes, dtype=torch.float32)
