# SPDX-License-Identifier: Apache-2.0
"""An FP8 cache: written as torch's own cast writes, read as a wider cache of the same numbers is read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from neuron_core import ops
from neuron_core.ops import reference

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16)
SCALES = {"none": None, "tensor": [0.037], "head": [0.037, 1.0, 5.5, 0.25]}


pytestmark = pytest.mark.usefixtures("kernels")


def every_bfloat16() -> Tensor:
    """All 65,536 of them, NaNs and infinities included, ``[256, 4, 64]``."""
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 4, 64)


def codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def scale_of(kind: str) -> Tensor | None:
    numbers = SCALES[kind]
    return None if numbers is None else torch.tensor(numbers)


@pytest.mark.parametrize("fp8_max", [240.0, 448.0])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_stored_as_torch_casts_it(dtype: torch.dtype, kind: str, fp8_max: float) -> None:
    key, scale = every_bfloat16().to(dtype), scale_of(kind)
    value = key.flip(0).contiguous()
    slots = torch.randperm(256, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    kv = torch.zeros(16, 4, 16, 128, dtype=torch.uint8).view(FP8)
    functional = torch.ops.neuron.kv_write(kv, key, value, slots, scale, scale, fp8_max)
    ops.kv_write_(kv, key, value, slots, k_scale=scale, v_scale=scale, fp8_max=fp8_max)
    factor = 1.0 if scale is None else (1.0 / scale).view(-1, 1)
    for stored in (kv, functional):
        rows = codes(stored).transpose(1, 2).reshape(256, 4, 128)[slots.long()]
        for written, got in ((key, rows[..., :64]), (value, rows[..., 64:])):
            expected = (written.float() * factor).clamp(-fp8_max, fp8_max).to(FP8)
            assert torch.equal(got, codes(expected))
            assert expected.float()[~written.isnan()].abs().max() == fp8_max


def test_numbers_halfway_between_two_are_rounded_to_even() -> None:
    finite = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    halfway = (finite[:-1] + finite[1:]) / 2
    numbers = torch.cat((halfway, halfway.nextafter(torch.tensor(1e9)), halfway.nextafter(torch.tensor(0.0))))
    key = torch.nn.functional.pad(numbers, (0, 384 - len(numbers))).view(8, 1, 48)
    kv = torch.zeros(1, 1, 16, 96, dtype=torch.uint8).view(FP8)
    ops.kv_write_(kv, key, -key, torch.arange(8, dtype=torch.int32))
    assert torch.equal(codes(kv)[0, 0, :8, :48], codes(key.to(FP8))[:, 0])
    assert torch.equal(codes(kv)[0, 0, :8, 48:], codes((-key).to(FP8))[:, 0])


def test_only_the_slots_of_a_step_change() -> None:
    kv = torch.randint(0, 127, (5, 2, 16, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    before = kv.clone()
    key = torch.full((3, 2, 16), 2.0)
    slots = torch.tensor([33, -1, 79], dtype=torch.int32)
    functional = torch.ops.neuron.kv_write(kv.view(FP8), key, key, slots)
    assert torch.equal(kv, before)
    ops.kv_write_(kv.view(FP8), key, key, slots)
    assert torch.equal(codes(functional), kv)
    for slot in (33, 79):
        before[slot // 16, :, slot % 16] = 0x40  # exponent 8 - 7, mantissa 0
    assert torch.equal(kv, before)


def fp8_cache(context: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """A cache of random finite codes and the blocks of its one request."""
    generator = torch.Generator().manual_seed(3)
    width = -(-context // block_size)
    shape = (width + 1, kv_heads, block_size, 2 * head_dim)
    magnitude = torch.randint(0, 0x49, shape, dtype=torch.uint8, generator=generator)
    sign = torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator) * 0x80
    table = torch.arange(width, 0, -1, dtype=torch.int32).view(1, -1)
    return (magnitude | sign).view(FP8), table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize(("block_size", "kv_heads", "head_dim"), [(16, 3, 64), (32, 2, 40), (48, 1, 24)])
def test_attention_is_that_over_a_wider_cache_bit_for_bit(
    dtype: torch.dtype, window: int, block_size: int, kv_heads: int, head_dim: int
) -> None:
    kv, table = fp8_cache(75, block_size, kv_heads, head_dim)
    query = torch.randn(75, 2 * kv_heads, head_dim, generator=torch.Generator().manual_seed(4)).to(dtype)
    rows, positions = torch.zeros(75, dtype=torch.int32), torch.arange(75, dtype=torch.int32)
    results = [
        ops.paged_attention(query, cache, table, rows, positions, scale=0.125, window=window)
        for cache in (kv, kv.to(dtype))  # three bits of mantissa: exact in either
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("kind", SCALES)
def test_every_code_is_read_as_torch_reads_it(kind: str, flush: bool) -> None:
    kv = torch.zeros(2, 4, 16, 128, dtype=torch.uint8)
    kv[1, :, 0, 64:] = torch.arange(256, dtype=torch.uint8).view(4, 64)
    index, scale = torch.zeros(1, dtype=torch.int32), scale_of(kind)
    expected = kv[1, :, 0, 64:].view(FP8).float() * (1.0 if scale is None else scale.view(-1, 1))
    torch.set_flush_denormal(flush)
    try:
        got = ops.paged_attention(
            torch.ones(1, 4, 64), kv.view(FP8), index.view(1, 1) + 1, index, index, scale=1.0, v_scale=scale
        )
    finally:
        torch.set_flush_denormal(False)
    torch.testing.assert_close(got[0], expected, atol=0.0, rtol=0.0, equal_nan=True)


@pytest.mark.parametrize("call", [ops.paged_attention, reference.paged_attention])
@pytest.mark.parametrize("kind", SCALES)
def test_scales_are_those_of_dense_attention(call, kind: str) -> None:
    context, group = 50, 2
    kv, table = fp8_cache(context, 16, 4, 64)
    k_scale, v_scale = scale_of(kind), scale_of(kind)
    v_scale = None if v_scale is None else v_scale.flip(0) * 3
    query = torch.randn(context, 4 * group, 64, generator=torch.Generator().manual_seed(5))
    rows, positions = torch.zeros(context, dtype=torch.int32), torch.arange(context, dtype=torch.int32)
    got = call(query, kv, table, rows, positions, scale=0.125, k_scale=k_scale, v_scale=v_scale)
    plain = kv.float()[table[0].long()].transpose(1, 2).reshape(-1, 4, 128)[:context].transpose(0, 1)
    key, value = (half.repeat_interleave(group, 0) for half in plain.split(64, -1))
    if k_scale is not None and v_scale is not None:
        key = key * k_scale.expand(4).repeat_interleave(group).view(-1, 1, 1)
        value = value * v_scale.expand(4).repeat_interleave(group).view(-1, 1, 1)
    dense = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key, value, is_causal=True
    )
    torch.testing.assert_close(got, dense.transpose(0, 1), atol=2e-5, rtol=2e-5)


def test_a_tokens_attention_depends_on_neither_batch_nor_phase() -> None:
    kv, table = fp8_cache(75, 16, 2, 64)
    query = torch.randn(75, 6, 64, generator=torch.Generator().manual_seed(5))
    rows, positions = torch.zeros(75, dtype=torch.int32), torch.arange(75, dtype=torch.int32)
    scales = {"k_scale": torch.tensor([0.3, 0.7]), "v_scale": torch.tensor([1.7])}
    whole = ops.paged_attention(query, kv, table, rows, positions, scale=0.125, **scales)
    alone = [
        ops.paged_attention(
            query[i : i + 1], kv, table, rows[:1], positions[i : i + 1], scale=0.125, **scales
        )
        for i in range(75)
    ]
    assert torch.equal(whole, torch.cat(alone))


@pytest.mark.parametrize("write", [ops.kv_write_, reference.kv_write])
def test_scales_belong_to_a_cache_of_fp8(write) -> None:
    key, slots = torch.ones(1, 2, 16), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="takes no scales; only float8_e4m3fn"):
        write(torch.zeros(1, 2, 16, 32), key, key, slots, v_scale=torch.ones(1))
    with pytest.raises(RuntimeError, match="only a float8_e4m3fn cache takes scales"):
        torch.ops.neuron.kv_write_(torch.zeros(1, 2, 16, 32), key, key, slots, torch.ones(1))
    with pytest.raises((RuntimeError, ValueError), match=r"fp8_max.* at most 448"):
        write(torch.zeros(1, 2, 16, 32).to(FP8), key, key, slots, fp8_max=449.0)


@pytest.mark.parametrize("scale", [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, 1)])
def test_a_scale_of_another_form_is_refused(scale: Tensor) -> None:
    kv, key = torch.zeros(1, 2, 16, 32).to(FP8), torch.ones(1, 2, 16)
    index = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"scales must be contiguous float32 \[1\] or \[kv heads\]"):
        ops.kv_write_(kv, key, key, index, k_scale=scale)
    with pytest.raises(RuntimeError, match=r"scales must be contiguous float32 \[1\] or \[kv heads\]"):
        ops.paged_attention(key, kv, index.view(1, 1), index, index, scale=1.0, v_scale=scale)
