# SPDX-License-Identifier: Apache-2.0
"""A plan is checked once, and a refusal names sizes that work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_core.errors import ConfigError
from neuron_parallel import ParallelGroups, ParallelPlan

SIZES = st.integers(1, 64)


@pytest.mark.parametrize("size", [0, -1])
def test_a_degree_below_one_is_refused(size):
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size={size}"):
        ParallelPlan(tensor_parallel_size=size)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "intermediate", "problem", "working"),
    [
        (3, 4, 2, 48, "does not divide 4 attention heads", "use 1, 2 or 4"),
        (6, 12, 4, 48, "neither divides nor is a multiple of 4 KV heads", "use 1, 2, 4 or 12"),
        (4, 8, 8, 6, "does not divide the intermediate size 6", "use 1 or 2"),
        (2, 9, 3, 1536, "does not divide 9 attention heads", "use 1 or 3"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_works(size, heads, kv_heads, intermediate, problem, working):
    with pytest.raises(ConfigError) as caught:
        ParallelPlan(size).check_model(num_heads=heads, num_kv_heads=kv_heads, intermediate_size=intermediate)
    assert problem in str(caught.value)
    assert str(caught.value).endswith(working)


@given(size=SIZES, kv_heads=SIZES, grouping=st.integers(1, 8), intermediate=SIZES)
def test_what_is_accepted_gives_every_rank_equal_whole_heads(size, kv_heads, grouping, intermediate):
    heads = kv_heads * grouping
    try:
        ParallelPlan(size).check_model(num_heads=heads, num_kv_heads=kv_heads, intermediate_size=intermediate)
    except ConfigError:
        return
    # Brute force: every query head of a rank finds its KV head on that rank.
    per_rank = heads // size
    for rank in range(size):
        needed = {head // grouping for head in range(rank * per_rank, (rank + 1) * per_rank)}
        parts = min(size, kv_heads)
        local = kv_heads // parts
        first = rank * parts // size * local
        assert needed == set(range(first, first + local))
    assert heads % size == 0 and intermediate % size == 0


def test_groups_of_more_than_one_rank_need_torch_distributed():
    with pytest.raises(ConfigError, match="to be initialised"):
        ParallelGroups.create(ParallelPlan(2))


def test_a_single_rank_needs_nothing():
    groups = ParallelGroups.create(ParallelPlan())
    assert groups == ParallelGroups.single()
    assert groups.tp.rank() == 0
