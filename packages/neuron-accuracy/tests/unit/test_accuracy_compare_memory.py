# SPDX-License-Identifier: Apache-2.0
"""Comparing captures takes memory for a piece of a tensor, not for the captures."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from neuron_accuracy.capture.records import RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.writer import CaptureWriter

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

CHILD = """
import resource, sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from neuron_accuracy.compare.captures import compare_captures

def anonymous_and_mapped():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024

before = anonymous_and_mapped()
outcome = compare_captures(Path(sys.argv[1]), Path(sys.argv[2]))
assert outcome.passed, outcome.faults
print(before, anonymous_and_mapped())
"""


def write_large(folder, modules, tokens, features):
    tokens_held = tuple(index % 100 for index in range(tokens))
    row = StepRow("a", 0, 0, tuple(range(tokens)), tokens_held)
    step = StepRecord(0, f"prefill_s{tokens}", "prefill", tokens, 1, (row,))
    writer = CaptureWriter(folder, captures.EVERYTHING, RunRecord(captures.info(dtype="bfloat16"), 1))
    # One tensor's memory for all modules: what is on disk is what counts.
    tensor = torch.randn(tokens, features, generator=torch.Generator().manual_seed(0)).bfloat16()
    writer.write_step(step, {(f"m.{index}", "output.0"): tensor for index in range(modules)})
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors")) // 2**20


def peak(tmp_path, modules, tokens, features):
    sizes = [write_large(tmp_path / name, modules, tokens, features) for name in ("test", "reference")]
    command = [sys.executable, "-c", CHILD, str(tmp_path / "test"), str(tmp_path / "reference")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
    before, after = map(int, result.stdout.split())
    print(f"captures of {sizes} MiB, peak {after} MiB, {before} MiB of it before")
    return sizes, before, after


def test_two_hundred_megabytes_take_a_part_of_that(tmp_path):
    """One tensor alone is 96 MiB, in float64 four times that; pieces of it take less than one copy of the captures."""
    sizes, before, after = peak(tmp_path, 1, 49152, 1024)
    assert sum(sizes) >= 190
    assert after - before < 160


@pytest.mark.nightly
def test_ten_gigabytes_each_stay_within_one_gibibyte(tmp_path):
    sizes, _, after = peak(tmp_path, 10, 131072, 4096)
    assert min(sizes) >= 10 * 1024
    assert after < 1024
