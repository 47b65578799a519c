# SPDX-License-Identifier: Apache-2.0
"""Slot arithmetic against indexing an actual cache."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_core.kv.slots import (
    NO_BLOCK,
    NO_SLOT,
    NULL_BLOCK,
    blocks_for,
    slots_for,
    slots_for_batch,
    without_null_blocks,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, list[list[int]], list[tuple[int, int]]]:
    """A block size, disjoint block tables, and tokens as (row or -1, position)."""
    block_size = draw(st.integers(1, 8))
    num_rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    ids = draw(st.permutations(range(1, num_rows * width + 1)))
    tables = [ids[row * width : (row + 1) * width] for row in range(num_rows)]
    token = st.tuples(st.integers(-1, num_rows - 1), st.integers(0, width * block_size - 1))
    return block_size, tables, draw(st.lists(token, unique=True, max_size=40))


@given(requests())
def test_writing_by_slot_fills_the_place_the_block_table_names(
    case: tuple[int, list[list[int]], list[tuple[int, int]]],
) -> None:
    block_size, tables, tokens = case
    rows = np.array([row for row, _ in tokens], dtype=np.int32)
    positions = np.array([position for _, position in tokens], dtype=np.int32)
    slots = slots_for_batch(np.array(tables, dtype=np.int32), rows, positions, block_size)
    assert slots.dtype == np.int32
    cache = np.full(((len(tables) * len(tables[0]) + 1), block_size), -1)
    for number, slot in enumerate(slots):
        if slot != NO_SLOT:
            cache.reshape(-1)[slot] = number
    for number, (row, position) in enumerate(tokens):
        if row == -1:
            assert slots[number] == NO_SLOT
        else:
            assert cache[tables[row][position // block_size], position % block_size] == number
    assert (cache[NULL_BLOCK] == -1).all()


def test_one_request_is_a_batch_of_one_row() -> None:
    assert slots_for(np.array([7, 2]), np.array([0, 15, 16, 31]), 16).tolist() == [112, 127, 32, 47]
    assert slots_for(np.array([7]), np.array([], dtype=np.int32), 16).tolist() == []


@pytest.mark.parametrize("missing", [NULL_BLOCK, NO_BLOCK])
def test_a_position_without_a_block_is_an_error(missing: int) -> None:
    with pytest.raises(ValueError, match="position 17 of row 0 has no block"):
        slots_for(np.array([3, missing]), np.array([1, 17]), 16)


@pytest.mark.parametrize("position", [-1, 32])
def test_a_position_outside_the_table_is_an_error(position: int) -> None:
    with pytest.raises(ValueError, match="outside the block table's 32 tokens"):
        slots_for(np.array([3, 4]), np.array([position]), 16)


def test_attention_tables_do_not_name_the_null_block() -> None:
    tables = np.array([[4, 0], [0, 0]], dtype=np.int64)
    masked = without_null_blocks(tables)
    assert masked.tolist() == [[4, NO_BLOCK], [NO_BLOCK, NO_BLOCK]]
    assert masked.dtype == np.int32 and tables.tolist() == [[4, 0], [0, 0]]


@given(tokens=st.integers(0, 1000), block_size=st.integers(1, 64))
def test_blocks_for_counts_the_blocks_positions_fall_into(tokens: int, block_size: int) -> None:
    assert blocks_for(tokens, block_size) == len({position // block_size for position in range(tokens)})
