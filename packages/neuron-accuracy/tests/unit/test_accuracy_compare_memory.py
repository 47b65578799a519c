# SPDX-License-Identifier: Apache-2.0
"""Comparing captures takes memory for a piece of a tensor, not for the captures."""

import importlib.util
import os
import shutil
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
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from neuron_accuracy.compare.captures import compare_captures

def peak():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024

before = peak()
outcome = compare_captures(Path(sys.argv[1]), Path(sys.argv[2]))
assert outcome.passed, outcome.faults
print(before, peak())
"""


def write_large(folder, tokens, features):
    """A capture of one module."""
    row = StepRow("a", 0, 0, tuple(range(tokens)), tuple(index % 100 for index in range(tokens)))
    step = StepRecord(0, f"prefill_s{tokens}", "prefill", tokens, 1, (row,))
    writer = CaptureWriter(folder, captures.EVERYTHING, RunRecord(captures.info(dtype="bfloat16"), 1))
    tensor = torch.randn(tokens, features, generator=torch.Generator().manual_seed(0)).bfloat16()
    writer.write_step(step, {("m.0", "output.0"): tensor})


def linked(folder, copy, modules):
    """The capture again, its module as so many: hard links, which read like files of their own."""
    shutil.copytree(folder, copy, copy_function=os.link)
    (first,) = copy.glob("dp0/*/m.0")
    for index in range(1, modules):
        shutil.copytree(first, first.with_name(f"m.{index}"), copy_function=os.link)
    return sum(path.stat().st_size for path in copy.rglob("*.safetensors")) / 2**20


def peak(tmp_path, modules, tokens, features):
    write_large(tmp_path / "made", tokens, features)
    sizes = [linked(tmp_path / "made", tmp_path / name, modules) for name in ("test", "reference")]
    command = [sys.executable, "-c", CHILD, str(tmp_path / "test"), str(tmp_path / "reference")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
    before, after = map(int, result.stdout.split())
    print(f"captures of {sizes} MiB, peak {after} MiB, {before} MiB of it before")
    return sizes, before, after


def test_two_hundred_megabytes_take_less_than_they_are(tmp_path):
    sizes, before, after = peak(tmp_path, 2, 24576, 1024)
    assert sum(sizes) >= 190
    assert after - before < 150


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_gigabytes_each_stay_within_one_gibibyte(tmp_path):
    sizes, _, after = peak(tmp_path, 10, 131072, 4096)
    assert min(sizes) >= 10 * 1024
    assert after < 1024
