# SPDX-License-Identifier: Apache-2.0
"""The KV budget never exceeds a limit, wastes less than a block, and its advice works."""

import dataclasses
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from neuron_core.devices.cpu import CpuDevice
from neuron_core.devices.host import Host
from neuron_core.errors import CapacityError, ConfigError
from neuron_core.kv.layout import KVLayout
from neuron_core.memory import FREE_MEMORY_STEPS, MemoryBudget, format_bytes, module_bytes

MIB = 1024**2
GIB = 1024**3

LAYOUTS = [KVLayout(3, 64, 16, torch.bfloat16)] * 30
BLOCK = 30 * 3 * 64 * 2 * 16 * 2

sizes = st.integers(0, 64 * GIB)
fractions = st.floats(0.01, 1.0)
budgets = st.builds(
    MemoryBudget,
    total_bytes=st.integers(1, 64 * GIB),
    free_bytes=sizes,
    utilization=fractions,
    weights_bytes=sizes,
    activation_bytes=st.integers(0, 2 * GIB),
    reserve_bytes=st.integers(0, GIB),
    cap_fraction=fractions,
)


@given(budget=budgets)
def test_kv_bytes_respect_every_limit_and_reach_the_one_that_decides(budget: MemoryBudget) -> None:
    kv = budget.kv_bytes
    by_utilization = budget.total_bytes * budget.utilization
    by_utilization -= budget.weights_bytes + budget.activation_bytes + budget.reserve_bytes
    by_free = budget.free_bytes - budget.activation_bytes - budget.reserve_bytes
    by_cap = budget.total_bytes * budget.cap_fraction
    assert kv >= 0
    assert kv <= max(0, min(by_utilization, by_free, by_cap))
    slack = min(by_utilization, by_free, by_cap) - kv
    assert slack <= 1 or (budget.limited_by == "free" and slack < budget.total_bytes / FREE_MEMORY_STEPS + 1)


@given(budget=budgets)
def test_blocks_fill_the_budget_to_less_than_one_block(budget: MemoryBudget) -> None:
    blocks = budget.num_blocks(LAYOUTS)
    assert blocks * BLOCK <= budget.kv_bytes < (blocks + 1) * BLOCK


@given(budget=budgets, max_model_len=st.integers(1, 200_000), override=st.none() | st.integers(1, 5000))
def test_a_request_is_refused_exactly_when_its_blocks_run_out(
    budget: MemoryBudget, max_model_len: int, override: int | None
) -> None:
    assume(override is None or 1 <= override <= allocatable(budget))
    have = budget.num_blocks(LAYOUTS) if override is None else override
    free_blocks = set(range(1, have))  # block 0 is the null block
    taken = {1 + position // 16 for position in range(0, max_model_len, 16)}
    if taken <= free_blocks:
        budget.require_one_request(max_model_len, LAYOUTS, override)
        return
    with pytest.raises(CapacityError) as caught:
        budget.require_one_request(max_model_len, LAYOUTS, override)
    shorter = re.search(r"--max-model-len (\d+) works", str(caught.value))
    if shorter is None:
        assert not free_blocks
    else:
        budget.require_one_request(int(shorter[1]), LAYOUTS, override)
        with pytest.raises(CapacityError):
            budget.require_one_request(int(shorter[1]) + 1, LAYOUTS, override)
    follow_advice(budget, str(caught.value), max_model_len, override)


def allocatable(budget: MemoryBudget) -> int:
    """Blocks that a plain count finds room for in free memory."""
    return max(0, budget.free_bytes - budget.activation_bytes - budget.reserve_bytes) // BLOCK


def follow_advice(budget: MemoryBudget, message: str, max_model_len: int, override: int | None) -> None:
    """Do what the message says about memory; the request must then fit."""
    if match := re.search(r"--num-gpu-blocks-override to (\d+)", message):
        assert override is not None
        budget.require_one_request(max_model_len, LAYOUTS, int(match[1]))
        return
    if override is not None:
        assert f"only {allocatable(budget)} blocks fit here" in message
        return
    if match := re.search(r"--gpu-memory-utilization to ([\d.]+)", message):
        raised = dataclasses.replace(budget, utilization=float(match[1]))
        # The free limit is rounded: utilization alone may not do; the explicit size below always does.
        assert raised.limited_by == "free" or raised.num_blocks(LAYOUTS) * 16 >= max_model_len + 16
    if match := re.search(r"--kv-cache-memory-bytes (\d+)", message):
        explicit = dataclasses.replace(budget, requested_kv_bytes=int(match[1]))
        explicit.require_one_request(max_model_len, LAYOUTS)
    else:
        assert "free memory" in message
        assert (-(-max_model_len // 16) + 1) * BLOCK > budget.free_bytes - 3 * GIB


@given(budget=budgets, override=st.integers(1, 100_000))
def test_an_override_is_refused_exactly_when_it_cannot_be_allocated(
    budget: MemoryBudget, override: int
) -> None:
    most = allocatable(budget)
    assume(most >= 2)
    if override <= most:
        budget.require_one_request(max(1, (override - 1) * 16), LAYOUTS, max(2, override))
        return
    with pytest.raises(CapacityError) as caught:
        budget.require_one_request(1, LAYOUTS, override)
    assert f"--num-gpu-blocks-override {override} (" in str(caught.value)
    assert f"--num-gpu-blocks-override {most} works" in str(caught.value)
    budget.require_one_request((most - 1) * 16, LAYOUTS, most)


@pytest.mark.parametrize("blocks", [0, -3])
def test_an_override_that_holds_nothing_is_refused_by_name(blocks: int) -> None:
    budget = MemoryBudget(4 * GIB, 3 * GIB, 0.9, 0)
    with pytest.raises(ConfigError, match=rf"--num-gpu-blocks-override={blocks}: must be at least 2"):
        budget.require_one_request(1, LAYOUTS, blocks)


def test_an_override_above_the_explicit_size_names_both() -> None:
    budget = MemoryBudget(4 * GIB, 3 * GIB, 0.9, 0, requested_kv_bytes=10 * BLOCK)
    budget.require_one_request(16, LAYOUTS, 10)
    with pytest.raises(CapacityError) as caught:
        budget.require_one_request(16, LAYOUTS, 11)
    assert "--num-gpu-blocks-override 11" in str(caught.value)
    assert f"--kv-cache-memory-bytes {10 * BLOCK} allows" in str(caught.value)
    assert "--num-gpu-blocks-override 10 works" in str(caught.value)


def test_the_log_ends_in_blocks_and_tokens() -> None:
    budget = MemoryBudget(4 * GIB, 3 * GIB, 0.9, 0, requested_kv_bytes=10 * BLOCK + 5)
    lines = [line.split() for line in budget.describe(LAYOUTS).splitlines()]
    assert [line[-1] for line in lines[-2:]] == ["10", str(9 * 16)]
    lines = [line.split() for line in budget.describe(LAYOUTS, 7).splitlines()]
    assert [line[-1] for line in lines[-2:]] == ["7", str(6 * 16)]


def test_numbers_of_a_typical_host() -> None:
    budget = MemoryBudget(16 * GIB, 12 * GIB, 0.9, GIB // 4, 128 * MIB)
    assert budget.limits == {
        "utilization": int(16 * GIB * 0.9) - GIB // 4 - 384 * MIB,
        "cap": int(16 * GIB * 0.30),
        "free": 12 * GIB - GIB // 2,
    }
    assert budget.limited_by == "cap"
    text = budget.describe()
    for expected in ("16.0 GiB", "12.0 GiB", "256.0 MiB", "128.0 MiB", "4.8 GiB", "by cap"):
        assert expected in text


def test_a_slightly_different_free_memory_gives_the_same_shapes() -> None:
    first = MemoryBudget(16 * GIB, 3000 * MIB, 0.9, 0)
    second = dataclasses.replace(first, free_bytes=3000 * MIB - 123_456_789)
    assert first.limited_by == "free"
    assert first.num_blocks(LAYOUTS) == second.num_blocks(LAYOUTS)


def test_the_message_has_the_numbers_and_the_flags() -> None:
    budget = MemoryBudget(4 * GIB, 3 * GIB, 0.5, 2 * GIB - 300 * MIB)
    with pytest.raises(CapacityError) as caught:
        budget.require_one_request(8192, LAYOUTS)
    message = str(caught.value)
    assert "max_model_len=8192 needs 513 blocks (180.4 MiB" in message
    assert "holds 125 (44.0 MiB): short by 136.4 MiB" in message
    assert "--max-model-len 1984 works" in message
    assert "--gpu-memory-utilization to 0.54" in message
    assert "--kv-cache-memory-bytes 189112320" in message


def test_an_explicit_size_replaces_the_computed_one_but_not_what_is_free() -> None:
    budget = MemoryBudget(4 * GIB, 2 * GIB, 0.9, 0, requested_kv_bytes=GIB)
    assert (budget.kv_bytes, budget.limited_by) == (GIB, "request")
    with pytest.raises(CapacityError, match=rf"--kv-cache-memory-bytes {2 * GIB - 256 * MIB} works"):
        dataclasses.replace(budget, requested_kv_bytes=2 * GIB)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes=0: must be at least 1; left out"):
        dataclasses.replace(budget, requested_kv_bytes=0)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1])
def test_fractions_outside_their_range_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=rf"gpu_memory_utilization={value}"):
        MemoryBudget(GIB, GIB, value, 0)
    with pytest.raises(ConfigError, match="kv_cap_fraction"):
        MemoryBudget(GIB, GIB, 0.9, 0, cap_fraction=value)


class FixedHost(Host):
    """A host of 32 GiB with 20 GiB free."""

    def total_memory_bytes(self) -> int:
        return 32 * GIB

    def available_memory_bytes(self) -> int:
        return 20 * GIB


@given(ranks=st.integers(1, 8))
def test_ranks_of_a_host_together_stay_within_it(ranks: int) -> None:
    device = CpuDevice(FixedHost())
    budget = MemoryBudget.for_device(device, ranks_on_host=ranks, utilization=0.9, weights_bytes=0)
    assert budget.total_bytes == 32 * GIB // ranks and budget.free_bytes == 20 * GIB // ranks
    assert ranks * budget.kv_bytes <= 0.30 * 32 * GIB


def test_module_bytes_counts_tied_weights_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    assert module_bytes([model]) == 2 * 10 * 4 * 4
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(3, dtype=torch.bfloat16))
    assert module_bytes([model, model[0]]) == 10 * 4 * 4 + 3 * 2
    assert module_bytes([nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta")]) == 2 * 20 * 4


@given(size=st.integers(0, 1 << 42))
def test_sizes_for_people_are_within_rounding(size: int) -> None:
    number, unit = format_bytes(size).split()
    scale = {"B": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB}[unit]
    assert abs(float(number) * scale - size) <= 0.05 * scale + 1e-6
    assume(size >= 1024)
    assert float(number) >= 1
