# SPDX-License-Identifier: Apache-2.0
"""What ranks hold makes the whole bit for bit, and an error where it cannot."""

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_accuracy.compare.whole import assemble, differing_replicas
from neuron_accuracy.errors import LayoutError
from neuron_accuracy.layout import Sharding, Slice, TensorLayout

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)


@st.composite
def cases(draw):
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    kind = draw(st.sampled_from(["slices", *Sharding]))
    lead = draw(st.lists(st.integers(1, 4), min_size=0, max_size=2))
    if kind == "slices":
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        replicas = draw(st.lists(st.sampled_from(divisors), min_size=1, max_size=3))
        slices = tuple(
            Slice(f"s{index}", ranks // count * draw(st.integers(1, 3)), count)
            for index, count in enumerate(replicas)
        )
        layout = TensorLayout(Sharding.SHARDED, slices=slices)
        shape = [*lead, sum(part.size for part in slices)]
    else:
        shape = [*lead, draw(st.integers(1, 4))]
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        if kind in (Sharding.SHARDED, Sharding.INTERLEAVED):
            shape[dim] = ranks * draw(st.integers(1, 3))
        layout = TensorLayout(Sharding(kind), dim)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64]))
    values = torch.randint(
        -100, 100, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    return values.to(dtype), layout, ranks


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_was_split_comes_back_bit_for_bit(case):
    whole, layout, ranks = case
    parts = captures.split(whole, layout, ranks)
    made = assemble(parts, layout)
    assert made.shape == whole.shape
    assert torch.equal(made.double(), whole.double())
    if layout.sharding is not Sharding.PARTIAL:
        assert made.dtype == whole.dtype
    assert differing_replicas(parts, layout) == []


@pytest.mark.parametrize("total", [5, 7, 8])
def test_tokens_dealt_out_unevenly_come_back(total):
    whole = torch.arange(total * 2.0).reshape(total, 2)
    parts = [whole[rank::3] for rank in range(3)]
    assert torch.equal(assemble(parts, TensorLayout(Sharding.INTERLEAVED, 0)), whole)


SHARDED = Sharding.SHARDED


@pytest.mark.parametrize(
    ("shapes", "layout", "message"),
    [
        ([(2, 3), (2, 4)], TensorLayout(Sharding.REPLICATED), r"rank 1 holds .*\[2, 4\].*replicated"),
        ([(2, 3), (2, 4)], TensorLayout(Sharding.PARTIAL), "of a tensor that is partial"),
        ([(2, 3), (3, 3)], TensorLayout(SHARDED), "do not fit along dimension -1"),
        ([(2, 3), (2, 3)], TensorLayout(SHARDED, 2), "dimension 2 of .* does not exist"),
        (
            [(2, 3), (4, 3)],
            TensorLayout(Sharding.INTERLEAVED, 0),
            r"are \[3, 3\], but the ranks hold \[2, 4\]",
        ),
        ([(2, 3), (2, 3)], TensorLayout(SHARDED, heads=4), "6 elements .* do not make 4 heads"),
        (
            [(2, 3)] * 2,
            TensorLayout(SHARDED, slices=(Slice("q", 5),)),
            "'q': 5 elements do not divide into 2",
        ),
        ([(2, 3)] * 2, TensorLayout(SHARDED, slices=(Slice("q", 4),)), "rank 0 holds has 3 .* make 2"),
        ([(2, 3)] * 3, TensorLayout(SHARDED, slices=(Slice("k", 6, 2),)), "2 replicas do not divide 3 ranks"),
        (
            [(2, 3)] * 2,
            TensorLayout(SHARDED, 0, slices=(Slice("q", 6),)),
            "slices lie along the last dimension",
        ),
        ([(2, 3)] * 2, TensorLayout(slices=(Slice("q", 4),)), "the whole tensor has 3 .* make 4"),
        ([], TensorLayout(), "no rank holds a part"),
    ],
)
def test_what_does_not_multiply_out_is_an_error(shapes, layout, message):
    with pytest.raises(LayoutError, match=message):
        assemble([torch.zeros(shape) for shape in shapes], layout)


def test_replicas_that_differ_are_found():
    whole = torch.randn(4, 8)
    off = whole.clone()
    off[2, 3] += 1e-6
    nan = whole.clone()
    nan[0, 0] = torch.nan
    assert [found[:2] for found in differing_replicas([whole, off, whole], TensorLayout())] == [(1, 0)]
    assert differing_replicas([nan, nan.clone()], TensorLayout()) == []
    assert [found[:2] for found in differing_replicas([whole, nan], TensorLayout())] == [(1, 0)]


def test_replicas_of_a_slice_that_differ_are_found():
    layout = TensorLayout(SHARDED, slices=(Slice("q", 8), Slice("k", 4, 2)))
    parts = captures.split(torch.arange(24.0).reshape(2, 12), layout, 4)
    assert differing_replicas(parts, layout) == []
    parts[3][1, -1] = -1
    assert [found[:2] for found in differing_replicas(parts, layout)] == [(3, 2)]
