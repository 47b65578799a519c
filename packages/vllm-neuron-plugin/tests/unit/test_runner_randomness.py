# SPDX-License-Identifier: Apache-2.0
"""The random numbers are those of the published generator, uniform, and decided by seed and place alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from vllm_neuron.runner.randomness import philox4x32, request_seed, uniforms

# https://github.com/DEShawResearch/random123, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert philox4x32(words(counter)[None], words(key)[None])[0].tolist() == words(expected).tolist()


def test_philox_treats_each_row_on_its_own():
    counters, keys, expected = (np.stack([words(row[i]) for row in KNOWN_ANSWERS]) for i in range(3))
    assert philox4x32(counters, keys).tolist() == expected.tolist()


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=20),
    st.randoms(),
)
@settings(max_examples=50, deadline=None)
def test_a_draw_does_not_depend_on_its_company(pairs, random):
    def draw(some):
        seeds, places = zip(*some, strict=True)
        return uniforms(np.array(seeds, np.uint64), np.array(places, np.int64)).tolist()

    together = dict(zip(pairs, draw(pairs), strict=True))
    random.shuffle(pairs)
    assert all(draw([pair]) == [together[pair]] for pair in pairs)
    assert all(0.0 <= value < 1.0 for value in together.values())


@pytest.mark.parametrize(
    ("seeds", "places"),
    [
        (np.full(20_000, 7, np.uint64), np.arange(20_000)),
        (np.arange(20_000, dtype=np.uint64), np.full(20_000, 100)),
        (np.arange(20_000, dtype=np.uint64) << np.uint64(32), np.full(20_000, 100)),
    ],
    ids=["one request's text", "neighbouring seeds", "seeds above 32 bits"],
)
def test_draws_are_uniform(seeds, places):
    drawn = uniforms(seeds, places)
    assert drawn.dtype == np.float32 and drawn.max() < 1.0
    assert kstest(drawn, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.03


def test_requests_without_a_seed_draw_differently_but_repeatably():
    seeds = {request_seed(f"request-{index}", 0) for index in range(1000)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**64 for seed in seeds)
    assert request_seed("a", 0) == request_seed("a", 0) != request_seed("a", 1)
