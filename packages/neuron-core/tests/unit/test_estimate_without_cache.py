# SPDX-License-Identifier: Apache-2.0
"""A model that keeps no cache fits when its weights and one step's tensors do."""

import pytest

from neuron_core.errors import CapacityError
from neuron_core.estimate import Footprint, StartEstimate
from neuron_core.memory import DEFAULT_RESERVE_BYTES

MIB = 1024**2
WEIGHTS, STEP = 100 * MIB, 300 * MIB
NEEDED = WEIGHTS + STEP + DEFAULT_RESERVE_BYTES


def estimate(free_bytes):
    return StartEstimate(Footprint(WEIGHTS, 0, (), STEP), 8192 * MIB, free_bytes, 0.9, 256)


def test_it_needs_no_block_and_fits_to_the_byte():
    assert (estimate(NEEDED).request_blocks, estimate(NEEDED).request_bytes) == (0, 0)
    estimate(NEEDED).require_fit()
    assert "KV cache of one block" in estimate(NEEDED).table()


def test_it_is_refused_by_how_much_a_step_is_short():
    with pytest.raises(CapacityError, match=r"One step does not fit: .* short by 1\.0 MiB") as caught:
        estimate(NEEDED - MIB).require_fit()
    assert "--max-num-batched-tokens" in str(caught.value)


def test_weights_alone_are_named_first():
    with pytest.raises(CapacityError, match="The weights do not fit"):
        estimate(WEIGHTS).require_fit()
