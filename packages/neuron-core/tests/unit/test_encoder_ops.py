# SPDX-License-Identifier: Apache-2.0
"""The kernels that encoders are made of: attention over whole texts, and the float32 product of packed weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from neuron_core import ops
from neuron_core.ops import reference

COUNTS = [1, 37, 100, 16, 128, 33, 12]
PADDING = 7


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel library, built once for the module."""
    return ops.load_kernels(tmp_path_factory.mktemp("kernels"))


def texts(heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key and value as views of one product's result, and whose each token is; padding is not a number."""
    rows = torch.arange(len(COUNTS), dtype=torch.int32).repeat_interleave(torch.tensor(COUNTS))
    rows = torch.cat((rows, torch.full((PADDING,), -1, dtype=torch.int32)))
    qkv = torch.randn(len(rows), 3, heads, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    return (*qkv.unbind(1), rows)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("heads", "head_dim"), [(12, 32), (3, 64), (2, 40), (1, 96), (4, 8)])
def test_attention_is_that_of_each_text_by_itself(heads, head_dim, dtype, atol):
    query, key, value, rows = texts(heads, head_dim, dtype)
    ours = {
        "kernel": ops.encoder_attention(query, key, value, rows, scale=head_dim**-0.5),
        "reference": reference.encoder_attention(query, key, value, rows, head_dim**-0.5),
    }
    begin = 0
    for count in COUNTS:
        place = slice(begin, begin + count)
        whole = (x[place].float().transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        expected = scaled_dot_product_attention(*whole)[0].transpose(0, 1)
        for name, found in ours.items():
            torch.testing.assert_close(found[place].float(), expected, atol=atol, rtol=atol, msg=name)
        begin += count
    for found in ours.values():
        assert not found[begin:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_texts_attention_does_not_depend_on_its_neighbours(dtype):
    query, key, value, rows = texts(3, 32, dtype)
    together = ops.encoder_attention(query, key, value, rows, scale=0.2)
    for row, count in enumerate(COUNTS):
        begin = sum(COUNTS[:row])
        place = slice(begin, begin + count)
        parts = (query[place], key[place], value[place], rows[place])
        assert torch.equal(ops.encoder_attention(*parts, scale=0.2), together[place])


def test_attention_refuses_what_it_would_misread():
    query, key, value, rows = texts(2, 32, torch.float32)
    with pytest.raises(RuntimeError, match="query, key and value must be alike"):
        ops.encoder_attention(query, key.contiguous(), value, rows, scale=1.0)
    with pytest.raises(RuntimeError, match="rows must be contiguous int32"):
        ops.encoder_attention(query, key, value, rows.long(), scale=1.0)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("rows", [1, 5, 11, 12, 13, 47, 48, 49, 97])
@pytest.mark.parametrize(("columns", "inner"), [(96, 130), (160, 7), (32, 384)])
def test_a_float32_product_equals_the_exact_one(rows, columns, inner):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(columns, inner, generator=generator)
    x = torch.randn(rows, inner, generator=generator)
    assert ops.can_pack(weight)
    packed = ops.pack_linear(weight)
    assert torch.equal(ops.library.unpack(packed), weight)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(ops.linear(x, packed).double(), expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(ops.linear(x, packed, wide=True), ops.linear(x, packed))


@pytest.mark.usefixtures("packing")
def test_a_rows_float32_product_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(8)
    packed = ops.pack_linear(torch.randn(320, 576, generator=generator))
    x = torch.randn(101, 576, generator=generator)
    whole = ops.linear(x, packed)
    for begin, end in [(0, 1), (3, 8), (17, 29), (40, 101)]:
        assert torch.equal(ops.linear(x[begin:end], packed), whole[begin:end])


def test_a_packed_float32_weight_serves_lookups():
    weight = torch.randn(64, 10, generator=torch.Generator().manual_seed(9))
    ids = torch.tensor([0, 63, 31, 32], dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, ops.pack_linear(weight)), weight[ids.long()])
