# SPDX-License-Identifier: Apache-2.0
"""Measures against numpy and scipy, and sums over pieces against the whole."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from neuron_accuracy.compare.metrics import (
    LOG_BINS,
    ULP_LABELS,
    bhattacharyya,
    coarser,
    log_histogram,
    ulp_distance,
    ulp_histogram,
)
from neuron_accuracy.compare.tally import Tally

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.parametrize("scale", [1.0, 1.1, 1.5, 3.0])
def test_the_overlap_of_two_normal_distributions_is_the_one_of_their_densities(scale):
    """``sqrt(2 s / (1 + s^2))`` for standard deviations 1 and s (Bhattacharyya 1943)."""
    first, second = normal(200_000), scale * normal(200_000, seed=1)
    expected = math.sqrt(2 * scale / (1 + scale**2))
    assert bhattacharyya(log_histogram(first), log_histogram(second)) == pytest.approx(expected, abs=0.01)


def test_small_samples_of_one_distribution_overlap_wholly_in_the_mean():
    found = [
        bhattacharyya(log_histogram(normal(500, seed=seed)), log_histogram(normal(500, seed=seed + 1000)))
        for seed in range(20)
    ]
    assert np.mean(found) > 0.99
    assert bhattacharyya(log_histogram(normal(500)), log_histogram(normal(500).abs())) < 0.85
    assert bhattacharyya(log_histogram(torch.ones(9)), log_histogram(-torch.ones(9))) == 0.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-(2.0**60), 2.0**60), min_size=1, max_size=30))
def test_every_value_is_counted_once_in_a_bin_of_its_sign(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    counts = log_histogram(tensor)
    assert int(counts.sum()) == len(values)
    half = LOG_BINS // 2
    assert int(counts[:half].sum()) == sum(value < 0 for value in values)
    assert int(counts[half]) == sum(value == 0 for value in values)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.floats(-100, 100, width=16), st.integers(0, 40))
def test_ulps_are_steps_to_the_next_value(dtype, start, steps):
    value = torch.tensor([start]).to(dtype)
    end = value.clone()
    for _ in range(steps):
        end = torch.nextafter(end, torch.tensor([1e4]).to(dtype))
    assert int(ulp_distance(end, value, dtype)) == steps
    assert int(ulp_distance(value, end, dtype)) == steps


def test_ulps_across_zero_are_no_fewer_than_can_be_counted():
    values = torch.tensor([2.0, 1e308, 5e-324], dtype=torch.float64)
    assert ulp_distance(values, -values, torch.float64).tolist() == [2**63 - 2, 2**63 - 2, 2]


def test_distances_are_counted_in_their_ranges():
    distances = torch.tensor([0, 0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65, 10**6])
    assert dict(zip(ULP_LABELS, ulp_histogram(distances).tolist(), strict=True)) == {
        "0": 2,
        "1": 1,
        "2": 1,
        "3–4": 2,
        "5–8": 2,
        "9–16": 2,
        "17–64": 2,
        "> 64": 2,
    }


def test_the_coarser_dtype_rounds_more():
    assert coarser(torch.float32, torch.bfloat16) is torch.bfloat16
    assert coarser(torch.float16, torch.bfloat16) is torch.bfloat16
    assert coarser(torch.int64, torch.float16) is torch.float16


def filled(cuts, baseline=True):
    test, reference, base = (normal(40, 12, seed=seed) for seed in range(3))
    tally = Tally(12, 3, torch.float32)
    pairs, positions = torch.arange(40) // 20, torch.arange(40) % 20
    for begin, end in itertools.pairwise(cuts):
        part = slice(begin, end)
        tally.add(test[part], reference[part], base[part] if baseline else None, pairs[part], positions[part])
    return tally, test.numpy(), reference.numpy(), base.numpy()


@pytest.mark.parametrize("cuts", [[0, 40], [0, 1, 7, 39, 40]])
def test_sums_are_those_of_numpy_however_they_are_cut(cuts):
    tally, test, reference, base = filled(cuts)
    norm = np.linalg.norm
    assert tally.cosine == pytest.approx((test * reference).sum() / norm(test) / norm(reference))
    assert tally.rel_l2 == pytest.approx(norm(test - reference) / norm(reference))
    assert tally.linf_rel == pytest.approx(abs(test - reference).max() / abs(reference).max())
    at = tally.linf_at
    row, channel = np.unravel_index(abs(test - reference).argmax(), test.shape)
    assert (at.pair * 20 + at.position, at.channel) == (row, channel)
    assert tally.sigma_ratio(0.0) == pytest.approx(norm(test - base) / norm(reference - base))
    halves = [slice(0, 20), slice(20, 40)]
    l2 = max(norm((test - base)[part]) / norm((reference - base)[part]) for part in halves)
    linf = max(abs(test - base)[part].max() / abs(reference - base)[part].max() for part in halves)
    assert tally.worst_ratios(0.0, 0.0) == pytest.approx((linf, l2))
    least = [abs(base)[part].max() for part in halves]
    l2 = max(
        norm((test - base)[part]) / max(norm((reference - base)[part]), one)
        for part, one in zip(halves, least, strict=True)
    )
    linf = max(
        abs(test - base)[part].max() / max(abs(reference - base)[part].max(), one)
        for part, one in zip(halves, least, strict=True)
    )
    assert tally.worst_ratios(0.0, 1.0) == pytest.approx((linf, l2))
    heads = [norm((test - reference)[:, h * 4 : h * 4 + 4]) ** 2 for h in range(3)]
    assert tally.by_head.error.numpy() == pytest.approx(np.array(heads))
    dots = np.einsum("nhd,nkd->hk", test.reshape(40, 3, 4), reference.reshape(40, 3, 4))
    assert tally.by_head.dots.numpy() == pytest.approx(dots)
    error = tally.by_row()[2].numpy()
    assert error == pytest.approx(norm(test - reference, axis=1) ** 2)
    for channel in range(12):
        slope = stats.linregress(
            reference[:, channel], (test - reference)[:, channel], alternative="two-sided"
        )
        through_zero = (
            (test - reference)[:, channel] @ reference[:, channel] / (reference[:, channel] ** 2).sum()
        )
        sums = tally.channels
        assert float(sums.dr.sum(0)[channel] / sums.rr.sum(0)[channel]) == pytest.approx(through_zero)
        assert np.sign(slope.slope) == np.sign(through_zero)


def test_no_error_of_the_reference_makes_no_ratio_infinite():
    tally = Tally(4, None, torch.bfloat16)
    ones = torch.ones(2, 4)
    tally.add(ones * 1.0001, ones, ones, torch.zeros(2, dtype=torch.long), torch.arange(2))
    assert tally.sigma_ratio(0.0) == math.inf
    assert tally.sigma_ratio(2**-8) == pytest.approx(1e-4 * 2**8, rel=1e-2)
