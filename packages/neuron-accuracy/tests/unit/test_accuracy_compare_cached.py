# SPDX-License-Identifier: Apache-2.0
"""Positions that a run found in its cache have tokens and no rows; and layouts that differ between phases."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.compare.captures import compare_captures
from neuron_accuracy.errors import LayoutError
from neuron_accuracy.layout import Sharding, TensorLayout
from neuron_accuracy.replace.source import ReferenceRows

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
assert _spec is not None and _spec.loader is not None
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

TOKENS = tuple(range(20, 32))
WHOLE = torch.randn(len(TOKENS), 8, generator=torch.Generator().manual_seed(0))
NAME = ("layer", "output.0")


def write(
    folder: Path, steps: list[tuple[str, int, int]], *, cached: int = 0, whole: torch.Tensor = WHOLE
) -> Path:
    """One request in ``steps`` (phase, first position, past the last), of which the first ``cached`` are in a cache."""
    writer = CaptureWriter(folder, captures.EVERYTHING, RunRecord(captures.info(), 1))
    for number, (phase, begin, end) in enumerate(steps):
        before = TOKENS[:begin] if number == 0 and cached else ()
        row = StepRow("r", 0, 0, tuple(range(begin, end)), TOKENS[begin:end], before)
        writer.write_step(StepRecord(number, phase, phase, end - begin, 1, (row,)), {NAME: whole[begin:end]})
    writer.close()
    return folder


def test_what_the_cache_held_is_not_missing(tmp_path):
    reference = write(tmp_path / "reference", [("prefill", 0, 12)])
    test = write(tmp_path / "test", [("prefill", 8, 10), ("decode", 10, 11), ("decode", 11, 12)], cached=8)
    outcome = compare_captures(test, reference)
    assert outcome.passed, outcome.faults
    assert outcome.data["requests"][0]["positions"] == 4, "those that both computed"

    wrong = WHOLE.clone()
    wrong[9] += 1
    test = write(tmp_path / "wrong", [("prefill", 8, 12)], cached=8, whole=wrong)
    assert "only positions 9 of r" in compare_captures(test, reference).faults[0].where


def test_without_the_cached_tokens_positions_are_missing(tmp_path):
    reference = write(tmp_path / "reference", [("prefill", 0, 12)])
    test = write(tmp_path / "test", [("prefill", 8, 12)])
    faults = compare_captures(test, reference).faults
    assert [(fault.kind, fault.detail) for fault in faults] == [
        ("missing positions", "the test has no rows of positions 0–7")
    ]


def test_rows_behind_cached_tokens_are_found_by_all_tokens(tmp_path):
    source = ReferenceRows(write(tmp_path / "test", [("prefill", 8, 12)], cached=8))
    (row,) = source.rows("layer:output.0", TOKENS, [9])
    assert torch.equal(row, WHOLE[9])
    assert source.rows("layer:output.0", (1, *TOKENS[1:]), [9]) == [None], "the tokens before it are others"


@pytest.mark.parametrize("declared", [True, False])
def test_a_layout_may_differ_between_phases(tmp_path, declared):
    """Sequence parallelism: two ranks share the rows of a prefill, and each has those of a decode step."""
    layouts = {"layer:output.0@prefill": TensorLayout(Sharding.SHARDED, dim=0)} if declared else {}
    run = RunRecord(captures.info(), 2, layouts)
    for rank in range(2):
        writer = CaptureWriter(tmp_path / "two", captures.EVERYTHING, run, rank=rank)
        for number, (phase, begin, end) in enumerate(
            [("prefill", 0, 10), ("decode", 10, 11), ("decode", 11, 12)]
        ):
            row = StepRow("r", 0, 0, tuple(range(begin, end)), TOKENS[begin:end])
            rows = WHOLE[begin:end]
            held = rows.chunk(2)[rank] if phase == "prefill" else rows
            writer.write_step(StepRecord(number, phase, phase, end - begin, 1, (row,)), {NAME: held})
        writer.close()
    reference = write(tmp_path / "reference", [("prefill", 0, 12)])
    if declared:
        assert compare_captures(Capture(tmp_path / "two"), reference).passed
    else:
        with pytest.raises(LayoutError, match="the step has 10 rows of tokens"):
            compare_captures(Capture(tmp_path / "two"), reference)
