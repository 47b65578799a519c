# SPDX-License-Identifier: Apache-2.0
"""What cannot be compared is an error, and what is missing, damaged or not finite a finding: never a silent pass."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.compare.captures import compare_captures
from neuron_accuracy.errors import CaptureError, LayoutError
from neuron_accuracy.findings import Severity
from neuron_accuracy.layout import Sharding, Slice, TensorLayout

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

REQUESTS = captures.REQUESTS
made, changed, pair = captures.made, captures.changed, captures.pair


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["test", "reference", "both"])
def test_what_is_not_finite_is_a_fault_on_either_side(tmp_path, value, side):
    tensors = made("m:output.0")

    def spoil(tensor):
        tensor[7, 3] = value

    wrong = changed(tensors, "m:output.0", spoil, ["b"])
    test, reference = pair(
        tmp_path, tensors if side == "test" else wrong, tensors if side == "reference" else wrong
    )
    outcome = compare_captures(test, reference)
    if side == "both" and math.isinf(value):
        # A score that both mask out is no difference.
        assert outcome.passed
        return
    assert [item.kind for item in outcome.faults] == ["not finite"]
    assert "at position 7 of b, channel 3" in outcome.faults[0].detail
    named = {"test": "the test", "reference": "the reference", "both": "the test and reference"}[side]
    assert f"the first in {named}" in outcome.faults[0].detail


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("vocabulary size", {"vocab_size": 101}),
        ("tokenizer", {"tokenizer": "u"}),
        ("revision", {"revision": "s"}),
    ],
)
def test_captures_of_different_models_are_refused(tmp_path, what, change):
    reference = captures.write(tmp_path / "r", REQUESTS, made("m:output.0"))
    test = captures.write(tmp_path / "t", REQUESTS, made("m:output.0"), **change)
    with pytest.raises(CaptureError, match=rf"different models: {what}"):
        compare_captures(test, reference)


def test_steps_missing_on_one_side_are_a_fault(tmp_path):
    steps = [[("a", 0, 10), ("b", 0, 20), ("c", 0, 1)], [("a", 10, 11)], [("a", 11, 24)]]
    tensors = made("m:output.0")
    reference = captures.write(tmp_path / "r", REQUESTS, tensors, steps)
    test = captures.write(tmp_path / "t", REQUESTS, tensors, steps[:2])
    (finding,) = compare_captures(test, reference).faults
    assert (finding.kind, finding.where) == ("missing positions", "a")
    assert finding.detail == "the test has no rows of positions 11–23"
    (finding,) = compare_captures(reference, test).faults
    assert finding.detail == "the reference has no rows of positions 11–23"


def test_steps_that_were_not_asked_for_are_noted_only(tmp_path):
    tensors = made("m:output.0")
    steps = [[("a", 0, 23), ("b", 0, 20), ("c", 0, 1)], [("a", 23, 24)]]
    spec = CaptureSpec(("**",), phases=("prefill",))
    reference = captures.write(tmp_path / "r", REQUESTS, tensors, steps)
    test = captures.write(tmp_path / "t", REQUESTS, tensors, steps, spec=spec)
    outcome = compare_captures(test, reference)
    assert outcome.passed
    assert [(item.kind, item.severity) for item in outcome.findings] == [("missing positions", Severity.NOTE)]


def test_a_module_missing_in_one_step_is_a_fault(tmp_path):
    tensors = made("m:output.0", "n:output.0")
    steps = [[("a", 0, 24)], [("b", 0, 20)], [("c", 0, 1)]]

    def without(step, rank, held):
        return {key: value for key, value in held.items() if key[0] != "n" or step.number != 1}

    reference = captures.write(tmp_path / "r", REQUESTS, tensors, steps)
    test = captures.write(tmp_path / "t", REQUESTS, tensors, steps, edit=without)
    (finding,) = compare_captures(test, reference).faults
    assert (finding.kind, finding.where) == ("missing step", "n:output.0")
    assert "step 1 of the test" in finding.detail


def test_requests_whose_tokens_part_are_a_fault_and_compared_up_to_there(tmp_path):
    tensors = made("m:output.0")
    other = {**REQUESTS, "a": [*REQUESTS["a"][:9], 99, *REQUESTS["a"][10:]]}
    beyond = changed(tensors, "m:output.0", lambda tensor: tensor[9:].mul_(-1), ["a"])
    reference = captures.write(tmp_path / "r", other, beyond)
    outcome = compare_captures(captures.write(tmp_path / "t", REQUESTS, tensors), reference)
    (finding,) = outcome.findings
    assert (finding.kind, finding.where) == ("tokens part", "a")
    assert "position 9 the test has token 6 and the reference 99" in finding.detail


def test_requests_without_a_pair_are_faults_and_none_at_all_an_error(tmp_path):
    tensors = made("m:output.0")
    reference = captures.write(tmp_path / "r", {"a": REQUESTS["a"]}, tensors)
    outcome = compare_captures(captures.write(tmp_path / "t", REQUESTS, tensors), reference)
    assert {(item.kind, item.where) for item in outcome.faults} == {
        ("request without a pair", "b"),
        ("request without a pair", "c"),
    }
    stranger = captures.write(tmp_path / "s", {"a": [1, 1, 1]}, tensors)
    with pytest.raises(CaptureError, match="begins with the tokens of one of"):
        compare_captures(stranger, reference)


def test_requests_that_were_not_asked_for_are_noted_only(tmp_path):
    tensors = made("m:output.0")
    reference = captures.write(tmp_path / "r", REQUESTS, tensors, spec=CaptureSpec(("**",), requests=("a",)))
    outcome = compare_captures(captures.write(tmp_path / "t", REQUESTS, tensors), reference)
    assert outcome.passed
    assert {(item.where, item.severity) for item in outcome.findings} == {
        ("b", Severity.NOTE),
        ("c", Severity.NOTE),
    }
    assert outcome.data["modules"][0]["rows"] == len(REQUESTS["a"])


def test_ranks_that_should_hold_the_same_but_do_not_are_a_fault(tmp_path):
    tensors = made("m:output.0")

    def apart(step, rank, held):
        if rank == 1 and step.number == 1:
            held["m", "output.0"][4, 0] += 1
        return held

    reference = captures.write(tmp_path / "r", REQUESTS, tensors)
    test = captures.write(tmp_path / "t", REQUESTS, tensors, ranks=2, edit=apart)
    (finding,) = compare_captures(test, reference).faults
    assert (finding.kind, finding.where) == ("replicas differ", "m:output.0")
    assert "in step 1 ranks 0 and 1 should hold the same" in finding.detail and "row 4" in finding.detail


def test_layouts_that_do_not_multiply_out_are_errors_naming_the_tensor(tmp_path):
    tensors = made("m:output.0")
    reference = captures.write(tmp_path / "r", REQUESTS, tensors)

    def halved(step, rank, held):
        return {key: value[: len(value) // 2] for key, value in held.items()}

    short = captures.write(tmp_path / "t", REQUESTS, tensors, edit=halved)
    with pytest.raises(
        LayoutError, match=r"m:output\.0 in step 0 is \[12, 24\], but the step has 24 rows of tokens"
    ):
        compare_captures(short, reference)
    captures.write(tmp_path / "u", REQUESTS, tensors, ranks=2)
    described = json.loads((tmp_path / "u" / "capture.json").read_text())
    layout = TensorLayout(Sharding.SHARDED, slices=(Slice("q", 7),))
    described["layouts"]["m:output.0"] = layout.to_json()
    described["names"]["m:output.0:q"] = "m:output.0"
    described["names"]["m:output.0"] = "m:fused"
    (tmp_path / "u" / "capture.json").write_text(json.dumps(described))
    with pytest.raises(
        LayoutError, match=r"m:output\.0:q: slice 'q': 7 elements do not divide into 2 pieces"
    ):
        compare_captures(tmp_path / "u", reference)


def test_a_rank_that_is_missing_is_an_error(tmp_path):
    tensors = made("m:output.0")
    reference = captures.write(tmp_path / "r", REQUESTS, tensors)
    layouts = {"m:output.0": TensorLayout(Sharding.SHARDED)}
    spec = CaptureSpec(("**",), ranks=(0,))
    test = captures.write(tmp_path / "t", REQUESTS, tensors, ranks=2, layouts=layouts, spec=spec)
    with pytest.raises(
        CaptureError, match=r"ranks \[1\] hold nothing of m:output\.0 in step 0, but it is sharded over 2"
    ):
        compare_captures(test, reference)


def test_tensors_of_other_widths_are_a_fault_unless_the_rest_is_padding(tmp_path):
    tensors = made("m:output.0")

    def widened(value):
        return lambda step, rank, held: {
            key: torch.cat([tensor, torch.full((len(tensor), 8), value)], 1) for key, tensor in held.items()
        }

    reference = captures.write(tmp_path / "r", REQUESTS, tensors)
    padded = captures.write(tmp_path / "p", REQUESTS, tensors, edit=widened(0.0))
    assert compare_captures(padded, reference).passed
    wider = captures.write(tmp_path / "t", REQUESTS, tensors, edit=widened(1.0))
    (finding,) = compare_captures(wider, reference).findings
    assert (finding.kind, finding.where) == ("shapes differ", "m:output.0")
    assert (
        finding.detail
        == "m:output.0 has 32 features in the test, m:output.0 has 24 features in the reference"
    )


def test_captures_with_nothing_in_common_are_an_error(tmp_path):
    reference = captures.write(tmp_path / "r", REQUESTS, made("m:output.0"))
    test = captures.write(tmp_path / "t", REQUESTS, made("n:output.0"))
    with pytest.raises(CaptureError, match="no tensor of one name"):
        compare_captures(test, reference)
    named = captures.write(tmp_path / "n", REQUESTS, made("n:output.0"), names={"n:output.0": "m:output.0"})
    assert compare_captures(named, reference).passed


def test_two_tensors_of_one_name_are_an_error(tmp_path):
    reference = captures.write(tmp_path / "r", REQUESTS, made("m:output.0"))
    names = {"n:output.0": "m:output.0"}
    test = captures.write(tmp_path / "t", REQUESTS, made("m:output.0", "n:output.0"), names=names)
    with pytest.raises(CaptureError, match=r"m:output\.0 and n:output\.0 are both called m:output\.0"):
        compare_captures(test, reference)
