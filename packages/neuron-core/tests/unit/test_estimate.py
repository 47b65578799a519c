# SPDX-License-Identifier: Apache-2.0
"""An estimate made of shapes refuses what will not fit, lets pass what will, and gives advice that works."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from neuron_core.errors import CapacityError
from neuron_core.estimate import Footprint, StartEstimate
from neuron_core.kv.layout import KVLayout
from neuron_core.memory import module_bytes

MIB = 1024**2
GIB = 1024**3

LAYOUTS = (KVLayout(3, 64, 16, torch.bfloat16),) * 30
BLOCK = 30 * 3 * 64 * 2 * 16 * 2


class Packs:
    """A device that keeps the weights of linear layers as copies of its own."""

    def prepare(self, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.weight = nn.Parameter(part.weight.detach().t().contiguous(), requires_grad=False)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 32), nn.Linear(32, 8))


def test_a_footprint_of_shapes_is_that_of_the_real_model() -> None:
    with torch.device("meta"):
        shapes = tiny()
    footprint = Footprint.of(shapes, LAYOUTS, Packs())  # type: ignore[arg-type]
    real = tiny()
    assert footprint.weights_bytes == module_bytes([real]) == sum(p.nbytes for p in real.parameters())
    # The embedding is larger, but it is not copied.
    assert footprint.packing_bytes == real[1].weight.nbytes < real[0].weight.nbytes


def estimate(**changes: object) -> StartEstimate:
    values = {
        "footprint": Footprint(2 * GIB, 100 * MIB, LAYOUTS),
        "total_bytes": 16 * GIB,
        "free_bytes": 12 * GIB,
        "utilization": 0.9,
        "max_model_len": 8192,
    }
    return StartEstimate(**(values | changes))  # type: ignore[arg-type]


estimates = st.builds(
    StartEstimate,
    footprint=st.builds(
        Footprint,
        weights_bytes=st.integers(0, 16 * GIB),
        packing_bytes=st.integers(0, GIB),
        layouts=st.just(LAYOUTS),
        activation_bytes=st.integers(0, GIB),
    ),
    total_bytes=st.integers(8 * GIB, 16 * GIB),
    free_bytes=st.integers(0, 16 * GIB),
    utilization=st.floats(0.05, 1.0),
    max_model_len=st.integers(1, 100_000),
    num_blocks=st.none() | st.integers(1, 8000),
    requested_kv_bytes=st.none() | st.integers(1, 4 * GIB),
    reserve_bytes=st.just(0),
)


@given(estimate=estimates)
def test_what_passes_fits_free_memory_while_loading_and_while_serving(estimate: StartEstimate) -> None:
    footprint, free = estimate.footprint, estimate.free_bytes
    request = (-(-estimate.max_model_len // 16) + 1) * BLOCK
    if estimate.fits():
        assert footprint.weights_bytes + footprint.packing_bytes <= free
        assert footprint.weights_bytes + footprint.activation_bytes + request <= free
        assert footprint.weights_bytes + (estimate.num_blocks or 0) * BLOCK <= free
    else:
        # With all of 16 GiB and more at its disposal nothing but an explicit size can be too small.
        vast = dataclasses.replace(estimate, total_bytes=1024 * GIB, free_bytes=1024 * GIB, utilization=1.0)
        explicit = estimate.num_blocks is not None or estimate.requested_kv_bytes is not None
        assert vast.fits() or explicit


@given(estimate=estimates)
def test_the_shorter_length_that_is_advised_fits(estimate: StartEstimate) -> None:
    try:
        estimate.require_fit()
    except CapacityError as error:
        for length in re.findall(r"--max-model-len (\d+) works", str(error)):
            dataclasses.replace(estimate, max_model_len=int(length)).require_fit()
        for blocks in re.findall(r"--num-gpu-blocks-override (\d+) works", str(error)):
            if int(blocks) > 1:
                shorter = (int(blocks) - 1) * 16
                dataclasses.replace(estimate, num_blocks=int(blocks), max_model_len=shorter).require_fit()


@pytest.mark.parametrize("explicit", [{"num_blocks": 513}, {"requested_kv_bytes": 513 * BLOCK}], ids=str)
def test_weights_and_an_explicit_cache_fit_to_the_byte(explicit: dict[str, int]) -> None:
    exact = 2 * GIB + 256 * MIB + 513 * BLOCK
    assert estimate(free_bytes=exact, **explicit).fits()
    assert not estimate(free_bytes=exact - 1, **explicit).fits()


def test_weights_that_do_not_fit_say_by_how_much() -> None:
    with pytest.raises(CapacityError) as caught:
        estimate(free_bytes=2 * GIB).require_fit()
    message = str(caught.value)
    # 2 GiB + 100 MiB + 256 MiB reserve, and 2 GiB are free.
    assert "2.3 GiB to load them (2.0 GiB of weights, 100.0 MiB while packing the largest" in message
    assert "short by 356.0 MiB" in message
    assert "No other --tensor-parallel-size works here." in message
    assert "Memory estimate before loading:" in message


def test_a_request_that_does_not_fit_names_three_ways_out() -> None:
    small = estimate(utilization=0.145)  # 2.32 GiB less weights and reserve leave about 72 MiB
    with pytest.raises(CapacityError) as caught:
        small.require_fit([lambda: estimate(utilization=0.2, tensor_parallel_size=2)])
    message = str(caught.value)
    assert "needs 513 blocks (180.4 MiB" in message and "short by" in message
    (length,) = re.findall(r"--max-model-len (\d+) works", message)
    dataclasses.replace(small, max_model_len=int(length)).require_fit()
    (raised,) = re.findall(r"--gpu-memory-utilization to ([\d.]+)", message)
    dataclasses.replace(small, utilization=float(raised)).require_fit()
    assert "--tensor-parallel-size 2 works." in message


def test_the_degree_that_works_is_the_first_that_fits() -> None:
    asked = []

    def other(degree: int) -> StartEstimate:
        asked.append(degree)
        return estimate(
            free_bytes=GIB, footprint=Footprint(2 * GIB // degree, 0, LAYOUTS), tensor_parallel_size=degree
        )

    degrees = [lambda degree=degree: other(degree) for degree in (2, 4, 8)]
    with pytest.raises(CapacityError, match=r"--tensor-parallel-size 4 works\."):
        estimate(free_bytes=GIB).require_fit(degrees)
    assert asked == [2, 4]


def test_the_table_has_every_term() -> None:
    text = estimate(num_blocks=600, requested_kv_bytes=GIB).table()
    for expected in (
        "16.0 GiB",
        "12.0 GiB",
        "2.0 GiB",
        "100.0 MiB",
        "256.0 MiB",
        "10.0 GiB",
        "360.0 KiB",
        "one request of 8192 tokens (513 blocks)",
        "180.4 MiB",
        "--num-gpu-blocks-override 600",
        "210.9 MiB",
        "--kv-cache-memory-bytes",
    ):
        assert expected in text
