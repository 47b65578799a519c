# SPDX-License-Identifier: Apache-2.0
"""Snapshots of calls, written by hand, and what a replay says of them."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from neuron_accuracy.errors import CaptureError
from neuron_accuracy.findings import Outcome
from neuron_accuracy.snapshots.replay import replay
from neuron_accuracy.snapshots.store import CallRecord, find_calls, is_equal, write_call
from neuron_core.devices.cpu import CpuDevice
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.program import Part, TensorSpec

NAN, INF = float("nan"), float("inf")
RECORD = CallRecord("proj", "", 0, 0, "fx", ("step 0",), ("weight", "bias", "x"), 2, ())


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64).requires_grad_(False)


def stored(
    folder: Path, linear: nn.Linear, x: Tensor, given: Tensor, record: CallRecord = RECORD
) -> list[Path]:
    """A call of ``linear`` on ``x`` that is said to have given ``given``."""
    builder = GraphBuilder(CpuDevice(), FxCompiler(), CompileCache(folder / "cache"))
    graph = builder.capture(Part("proj", linear, ("x",), ("y",)), (TensorSpec.of(x),))
    inputs = [linear.weight, linear.bias, x]
    write_call(folder / "calls" / "step0" / "proj" / "rank0", graph, record, inputs, {"output.0": given})
    return find_calls(folder / "calls")


def replayed(folder: Path, linear: nn.Linear, x: Tensor, given: Tensor, compiler: str = "fx") -> Outcome:
    record = dataclasses.replace(RECORD, compiler=compiler)
    return replay(stored(folder, linear, x, given, record), "fx")


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
@pytest.mark.parametrize(
    ("recorded", "replayed_row", "count"),
    [
        pytest.param(NAN, 0, 128, id="NaN in another row"),
        pytest.param(INF, 3, 64, id="infinity for NaN"),
        pytest.param(1e30, 3, 64, id="a number for NaN"),
    ],
)
def test_what_is_not_finite_must_be_so_in_the_same_places(
    tmp_path, linear, compiler, recorded, replayed_row, count
):
    """The engine recorded it in row 3; the replay gives NaN in ``replayed_row``."""
    x = torch.randn(4, 64)
    given = linear(x)
    given[3] = recorded
    x[replayed_row] = NAN
    outcome = replayed(tmp_path, linear, x, given, compiler)
    (finding,) = outcome.faults
    assert finding.kind == "not finite"
    assert f"{count} of 256 values are not finite on one side alone" in finding.detail


@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_not_finite_on_both_sides_is_the_same(tmp_path, linear, value):
    x = torch.randn(4, 64)
    x[1] = value
    outcome = replayed(tmp_path, linear, x, linear(x))
    assert outcome.passed, outcome.faults
    assert outcome.data["calls"][0]["equal"]


def test_only_another_compiler_may_differ_by_a_rounding(tmp_path, linear):
    x = torch.randn(4, 64)
    given = linear(x)
    given[2, 5] = torch.nextafter(given[2, 5], torch.tensor(INF))
    assert not replayed(tmp_path / "same", linear, x, given).passed
    assert replayed(tmp_path / "other", linear, x, given, "inductor").passed


def test_another_shape_diverges(tmp_path, linear):
    """One row would be held against each of four by broadcasting."""
    x = torch.ones(4, 64)
    assert [f.kind for f in replayed(tmp_path, linear, x, linear(x)[:1], "inductor").faults] == ["diverges"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_infinity_equals_no_number(dtype):
    largest = torch.tensor([torch.finfo(dtype).max, 1.0]).to(dtype)
    infinite = torch.tensor([INF, 1.0]).to(dtype)
    assert is_equal(infinite, infinite.clone())
    assert not is_equal(infinite, largest)
    assert not is_equal(infinite, torch.tensor([NAN, 1.0]).to(dtype))
    assert not is_equal(infinite, torch.tensor([-INF, 1.0]).to(dtype))


def test_a_full_disk_is_an_error_of_the_capture_and_leaves_nothing(tmp_path, linear):
    """safetensors raises an error of its own, which would end the engine."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    x = torch.randn(4, 64)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))
    try:
        with pytest.raises(CaptureError, match=r"rank0 cannot be written: .*give an empty folder with room"):
            stored(tmp_path, linear, x, linear(x))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "calls" / "step0" / "proj").iterdir()) == []
