# SPDX-License-Identifier: Apache-2.0
"""Slot arithmetic of the paged cache: ``slot = block_id * block_size + position % block_size``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NO_BLOCK",
    "NO_SLOT",
    "NULL_BLOCK",
    "blocks_for",
    "slots_for",
    "slots_for_batch",
    "without_null_blocks",
]

NULL_BLOCK = 0
"""Block id that vLLM never gives to a request; tables use it as a filler."""

NO_SLOT = -1
"""Slot of a padding token: nothing is written."""

NO_BLOCK = -1
"""Entry of a block table handed to attention where there is no block: nothing is read."""

Ints = NDArray[np.integer]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that ``num_tokens`` tokens of one request occupy."""
    return -(-num_tokens // block_size)


def slots_for(block_table_row: Ints, positions: Ints, block_size: int) -> NDArray[np.int32]:
    """Slots int32 [n] of one request's tokens at ``positions`` [n], given its block ids [width].

    Raises ``ValueError`` for a position that has no block: writing it would lose the token or overwrite
    another's.
    """
    rows = np.zeros(len(positions), dtype=np.int32)
    return slots_for_batch(np.asarray(block_table_row)[None, :], rows, positions, block_size)


def slots_for_batch(
    block_tables: Ints, request_rows: Ints, positions: Ints, block_size: int
) -> NDArray[np.int32]:
    """Slots int32 [T] for tokens of many requests.

    ``block_tables`` is [R, width], ``request_rows`` and ``positions`` are [T].
    A row of -1 marks a padding token and gives ``NO_SLOT``. Raises ``ValueError`` for a position without a
    block.
    """
    rows = np.asarray(request_rows)
    places = np.asarray(positions)
    columns = places // block_size
    real = rows >= 0
    outside = real & ((places < 0) | (columns >= block_tables.shape[1]))
    if outside.any():
        limit = block_tables.shape[1] * block_size
        raise ValueError(f"position {places[outside][0]} is outside the block table's {limit} tokens")
    blocks = block_tables[np.where(real, rows, 0), np.where(real, columns, 0)].astype(np.int64)
    unassigned = real & (blocks <= NULL_BLOCK)
    if unassigned.any():
        raise ValueError(f"position {places[unassigned][0]} of row {rows[unassigned][0]} has no block")
    return np.where(real, blocks * block_size + places % block_size, NO_SLOT).astype(np.int32)


def without_null_blocks(block_tables: Ints) -> NDArray[np.int32]:
    """Tables for attention: an int32 copy with the null block as ``NO_BLOCK``, so that it is not read."""
    return np.where(block_tables == NULL_BLOCK, NO_BLOCK, block_tables).astype(np.int32)
