# SPDX-License-Identifier: Apache-2.0
"""A cache scattered into random blocks over ranks comes back bit for bit, and the figures are numpy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_accuracy.capture.records import CacheRecord
from neuron_accuracy.errors import LayoutError
from neuron_accuracy.kv.causes import ranges
from neuron_accuracy.kv.contiguous import (
    block_of,
    contiguous,
    disagreeing,
    disagreeing_scales,
    freed_positions,
)
from neuron_accuracy.kv.figures import measure
from neuron_accuracy.kv.requests import common_prefix


@st.composite
def layouts(draw):
    dcp, copies, local, groups = (draw(st.integers(1, 3)) for _ in range(4))
    return {
        "dcp": dcp,
        "replicas": dcp * copies,
        "local": local,
        "groups": groups,
        "block_size": draw(st.sampled_from([1, 4, 16])),
        "head_dim": draw(st.sampled_from([2, 8])),
        "length": draw(st.integers(1, 70)),
        "spare": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 2**31)),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn])),
    }


def scatter(layout, generator):
    """Each rank's pool of random blocks with the cache written position by position, and its pages."""
    heads, size, dcp = layout["groups"] * layout["local"], layout["block_size"], layout["dcp"]
    shape = (heads, layout["length"], 2 * layout["head_dim"])
    cache = torch.randn(shape, generator=generator).to(layout["dtype"])
    blocks = -(-layout["length"] // (size * dcp)) + layout["spare"]
    ids = torch.randperm(blocks + 5, generator=generator)[:blocks].tolist()
    pages = []
    for rank in range(layout["groups"] * layout["replicas"]):
        first = rank // layout["replicas"] * layout["local"]
        pool = torch.randn(blocks + 5, layout["local"], size, shape[2]).to(layout["dtype"])
        for position in range(layout["length"]):
            if position % dcp != rank % dcp:
                continue
            block, slot = divmod(position // dcp, size)
            for head in range(layout["local"]):
                pool[ids[block], head, slot] = cache[first + head, position]
        pages.append(pool[ids])
    freed = tuple(bool(x) for x in torch.rand(blocks, generator=generator) < 0.3)
    record = CacheRecord(
        "r",
        (1,) * layout["length"],
        0,
        size,
        tuple(ids),
        freed,
        1,
        heads,
        layout["head_dim"],
        layout["replicas"],
        dcp,
    )
    return cache, record, pages


@settings(max_examples=80, deadline=None)
@given(layouts())
def test_scattered_caches_come_back_bit_for_bit(layout):
    generator = torch.Generator().manual_seed(layout["seed"])
    cache, record, pages = scatter(layout, generator)
    keys, values = contiguous(record, pages)
    whole = torch.cat([keys, values], dim=-1)
    span = layout["block_size"] * layout["dcp"]
    for position in range(layout["length"]):
        if record.freed[position // span]:
            assert whole[:, position].isnan().all()
        else:
            assert torch.equal(whole[:, position], cache[:, position].float())
        assert block_of(record, position) == record.block_ids[position // span]
    assert disagreeing(record, pages) == []


@settings(max_examples=30, deadline=None)
@given(layouts(), st.data())
def test_a_replica_that_differs_is_found_at_its_position(layout, data):
    generator = torch.Generator().manual_seed(layout["seed"])
    _, record, pages = scatter(layout, generator)
    followers = [r for r in range(len(pages)) if r % layout["replicas"] >= layout["dcp"]]
    held = [p for p in range(layout["length"]) if not freed_positions(record)[p]]
    places = [(r, p) for r in followers for p in held if p % layout["dcp"] == r % layout["dcp"]]
    if not places:
        return
    rank, position = data.draw(st.sampled_from(places))
    block, slot = divmod(position // layout["dcp"], layout["block_size"])
    pages[rank][block, 0, slot, 0] = 3 if pages[rank][block, 0, slot, 0] != 3 else 4
    first = rank - rank % layout["replicas"] + rank % layout["dcp"]
    assert disagreeing(record, pages) == [(rank, first, position)]


def test_replicas_may_differ_in_blocks_that_were_given_back():
    record = CacheRecord("r", (1,) * 4, 0, 2, (0, 1), (True, False), 1, 1, 2, replicas=2)
    pages = torch.zeros(2, 2, 1, 2, 4)
    pages[1, 0] = 1.0
    assert disagreeing(record, list(pages)) == []
    pages[1, 1, 0, 1] = 1.0
    assert disagreeing(record, list(pages)) == [(1, 0, 3)]


def test_scales_are_compared_between_ranks_that_hold_the_same_positions():
    record = CacheRecord("r", (1,) * 8, 0, 2, (0, 1), (False,) * 2, 1, 2, 2, replicas=4, dcp=2)
    one, two = torch.ones(1), torch.tensor([2.0])
    # Ranks 0 and 2, 1 and 3 hold the same; 4 to 7 another head.
    scales = [(one, one), (two, one), (one, one), (two, one), (one, two), (one, two), (two, two), (one, one)]
    assert disagreeing_scales(record, scales) == [(6, 4, "keys"), (7, 5, "values")]
    assert disagreeing_scales(record, [(one, one)] * 8) == []


def test_scales_multiply_keys_and_values_of_each_head():
    record = CacheRecord("r", (1, 2), 0, 2, (0,), (False,), 1, 2, 2)
    pages = torch.arange(16.0).reshape(1, 2, 2, 4)
    keys, values = contiguous(record, [pages], [(torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0]))])
    assert torch.equal(keys, torch.tensor([[[0.0, 2], [8, 10]], [[24, 27], [36, 39]]]))
    assert torch.equal(values, torch.tensor([[[10.0, 15], [30, 35]], [[70, 77], [98, 105]]]))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_heads": 3}, "pages are"),
        ({"num_heads": 8}, "pages are"),
        ({"head_dim": 3}, "pages are"),
        ({"block_size": 5}, "pages are"),
        ({"replicas": 3}, "ranks"),
        ({"replicas": 0}, "ranks"),
        ({"dcp": 2}, "does not divide"),
        ({"token_ids": (1,) * 9}, "do not hold 9 positions"),
        ({"freed": (False,)}, "blocks"),
    ],
)
def test_shapes_that_do_not_multiply_out_are_refused(changes, message):
    values = {
        "request": "r",
        "token_ids": (1,) * 8,
        "num_cached": 0,
        "block_size": 4,
        "block_ids": (0, 1),
        "freed": (False, False),
        "num_layers": 1,
        "num_heads": 4,
        "head_dim": 2,
    }
    pages = [torch.zeros(2, 2, 4, 4)] * 2
    contiguous(CacheRecord(**values), pages)
    with pytest.raises(LayoutError, match=message):
        contiguous(CacheRecord(**(values | changes)), pages)


def test_scales_of_another_shape_are_refused():
    record = CacheRecord("r", (1, 2), 0, 2, (0,), (False,), 1, 2, 2)
    with pytest.raises(LayoutError, match=r"a scale is \[1\]"):
        contiguous(record, [torch.zeros(1, 2, 2, 4)], [(torch.ones(1), torch.ones(2))])


def test_the_figures_are_those_numpy_computes():
    random = np.random.default_rng(0)
    reference = random.normal(size=(3, 20, 8)).astype(np.float32)
    test = (1.3 * reference + 0.2 * random.normal(size=reference.shape)).astype(np.float32)
    figures = measure(torch.tensor(test), torch.tensor(reference))
    metrics = figures.sums.metrics()
    for head in range(3):
        t, r = test[head].astype(np.float64), reference[head].astype(np.float64)
        flat_t, flat_r = t.ravel(), r.ravel()
        norm = np.linalg.norm
        assert float(metrics["cosine"][head]) == pytest.approx(flat_t @ flat_r / norm(t) / norm(r))
        assert float(metrics["relative_l2"][head]) == pytest.approx(norm(t - r) / norm(r))
        assert float(metrics["relative_linf"][head]) == pytest.approx(abs(t - r).max() / abs(r).max())
        assert float(metrics["gain"][head]) == pytest.approx(
            np.polynomial.polynomial.polyfit(flat_r, flat_t, [1])[1]
        )
        edges = np.linspace(min(t.min(), r.min()), max(t.max(), r.max()), 65)
        p, q = (np.histogram(x, edges)[0] / x.size for x in (flat_t, flat_r))
        assert float(metrics["bhattacharyya"][head]) == pytest.approx(np.sqrt(p * q).sum(), rel=1e-3)
        median = np.sort(norm(r, axis=1))[9]
        expected = norm(t - r, axis=1) / np.maximum(norm(r, axis=1), median)
        np.testing.assert_allclose(figures.by_position[head], expected)


def test_sums_of_two_pieces_are_those_of_the_whole():
    test, reference = torch.randn(2, 2, 30, 4)
    whole = measure(test, reference).sums.metrics()
    parts = measure(test[:, :11], reference[:, :11]).sums + measure(test[:, 11:], reference[:, 11:]).sums
    for name in ("cosine", "relative_l2", "relative_linf", "gain"):
        torch.testing.assert_close(parts.metrics()[name], whole[name])


def test_zeros_have_figures():
    metrics = measure(torch.zeros(2, 3, 4), torch.stack([torch.zeros(3, 4), torch.ones(3, 4)])).sums.metrics()
    assert metrics["cosine"].tolist() == [1, 0]
    assert metrics["relative_l2"].tolist() == [0, 1]
    assert metrics["gain"].tolist() == [1, 0]
    assert metrics["bhattacharyya"].tolist() == [1, 0]


@given(st.sets(st.integers(0, 40)))
def test_ranges_say_every_number_once(numbers):
    said = [word.split("-") for word in ranges(numbers).split(", ") if word]
    assert sorted(n for word in said for n in range(int(word[0]), int(word[-1]) + 1)) == sorted(numbers)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_a_common_prefix_is_common_and_cannot_be_longer(first, second):
    length = common_prefix(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]
