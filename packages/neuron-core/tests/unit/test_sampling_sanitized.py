# SPDX-License-Identifier: Apache-2.0
"""The sampling kernel reads and writes inside its arrays, whatever a row of logits holds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from neuron_core import ops
from neuron_core.ops import kernels, reference

INF, NAN = float("inf"), float("nan")


def test_no_row_makes_the_kernel_leave_its_memory(tmp_path: Path) -> None:
    built = tmp_path / "draws"
    sources = [Path(__file__).with_name("sanitized_sampling.cpp")]
    sources += [kernels.SOURCES / name for name in ("sampling.cpp", "pool.cpp")]
    options = ["-O1", "-march=native", "-fopenmp", "-std=c++20", "-pthread", f"-I{kernels.SOURCES}"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["g++", *options, *sanitizers, *map(str, sources), "-o", str(built)], check=True)
    ran = subprocess.run([str(built)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.9), (5, 0.9)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "drawn"),
    [
        pytest.param([-INF] * 40, {0}, id="nothing left"),
        pytest.param([NAN] * 40, {0}, id="no number"),
        pytest.param([1.0] * 7 + [INF] + [1.0] * 32, {7}, id="one certain"),
        pytest.param([1.0] * 7 + [INF] + [1.0] * 31 + [INF], {7, 39}, id="two certain"),
    ],
)
def test_a_row_without_a_finite_peak_draws_what_the_reference_draws(
    logits, drawn, temperature, top_k, top_p
) -> None:
    uniform = torch.tensor([0.0, 0.3, 0.999])
    rows = torch.tensor([logits] * 3)
    rest = (
        torch.full((3,), temperature),
        torch.full((3,), top_k, dtype=torch.int32),
        torch.full((3,), top_p),
        torch.zeros(3),
        uniform,
    )
    tokens = ops.sample(rows, *rest)
    assert torch.equal(tokens, reference.sample(rows, *rest))
    assert set(tokens.tolist()) <= drawn
