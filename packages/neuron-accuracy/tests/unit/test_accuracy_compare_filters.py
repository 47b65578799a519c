# SPDX-License-Identifier: Apache-2.0
"""Requests are told apart by more than their ids, and a filter excuses only what it may have left out."""

import importlib.util
from pathlib import Path

import pytest
import torch

from neuron_accuracy.capture.records import RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.compare.captures import compare_captures
from neuron_accuracy.compare.traces import traces
from neuron_accuracy.findings import Severity
from neuron_accuracy.layout import Rows, TensorLayout

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

TABLE = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
A, B = list(range(10)), list(range(50, 60))
ALL = captures.EVERYTHING


def asked(**filters):
    return CaptureSpec(("**",), tensors=("*",), **filters)


def write(folder, *steps, dp=0, spec=ALL, wrong=(), without=(), modules=("m",), layouts=None, **changes):
    """A step is ``(phase, id, first position, token ids)``, with the tokens that a cache held behind them if any. Rows
    are those of ``TABLE``, of the opposite sign in ``wrong`` steps; ``without`` are steps whose last module is lost.
    """
    run = RunRecord(captures.info(**changes), 1, layouts or {})
    writer = CaptureWriter(folder, spec, run, dp=dp)
    for number, (phase, name, begin, ids, *cached) in enumerate(steps):
        positions = tuple(range(begin, begin + len(ids)))
        row = StepRow(name, 0, 0, positions, tuple(ids), tuple(cached[0]) if cached else ())
        step = StepRecord(number, f"{phase}_s{len(ids)}", phase, len(ids), 1, (row,))
        values = TABLE[torch.tensor(ids)] * (-1 if number in wrong else 1)
        held = {}
        for module in modules[:-1] if number in without else modules:
            last = (layouts or {}).get(f"{module}:output.0", TensorLayout()).rows is Rows.REQUESTS
            held[module, "output.0"] = values[-1:] if last else values
        writer.write_step(step, held)
    return folder


def prefill(name, ids, begin=0, *cached):
    return ("prefill", name, begin, ids, *cached)


def decode(name, ids, begin):
    return ("decode", name, begin, ids)


@pytest.mark.parametrize("wrong", [None, 0, 1])
@pytest.mark.parametrize("replicas", [True, False])
def test_requests_of_one_id_are_all_compared(tmp_path, replicas, wrong):
    """Each replica numbers its requests from 0; and a server may be given an id again."""

    def both(folder, wrong):
        steps = prefill("0", A), prefill("0", A if replicas else B)
        if not replicas:
            return write(folder, *steps, wrong=[wrong])
        for dp, step in enumerate(steps):
            write(folder, step, dp=dp, wrong=[0] if dp == wrong else [])
        return folder

    outcome = compare_captures(both(tmp_path / "t", wrong), both(tmp_path / "r", None))
    assert [item["positions"] for item in outcome.data["requests"]] == [10, 10]
    assert outcome.passed is (wrong is None)
    if wrong is not None:
        assert outcome.faults[0].where == f"m:output.0, only positions 0–9 of {('0', '0#2')[wrong]}"


def test_replicas_pair_with_the_requests_of_one(tmp_path):
    for dp, ids in enumerate((A, B)):
        write(tmp_path / "t", prefill("request-0", ids), dp=dp)
    one = write(tmp_path / "r", prefill("request-0", A), prefill("request-1", B))
    assert not compare_captures(tmp_path / "t", one).findings
    baseline = write(tmp_path / "b", prefill("x", B), prefill("y", A))
    outcome = compare_captures(tmp_path / "t", one, baseline)
    assert not outcome.findings and outcome.data["modules"][0]["rows"] == 20


@pytest.mark.parametrize(
    ("steps", "requests"),
    [
        ([prefill("a", A[:4]), decode("a", [4], 4), prefill("a", A[:6]), decode("a", [6], 6)], 1),
        ([prefill("a", A[:4]), decode("a", [4, 77, 78], 4), decode("a", [5, 6], 5)], 1),
        # A draft that was refused before the request was preempted.
        ([prefill("a", A[:4]), decode("a", [4, 77], 4), prefill("a", A[:5]), decode("a", [5], 5)], 1),
        ([prefill("a", A[:4]), prefill("a", [0, 1, 55, 56])], 2),
        ([prefill("a", A[:4]), decode("a", [4], 4), prefill("a", [0, 1, 55, 56])], 2),
        ([prefill("a", A[:4]), decode("a", [4], 4), prefill("a", [9], 2, [0, 55])], 2),
    ],
)
def test_what_runs_again_with_the_same_tokens_is_one_request(tmp_path, steps, requests):
    assert len(traces(captures.Capture(write(tmp_path / "c", *steps)))) == requests


ANSWER = [decode("a", [at], at) for at in range(6, 10)]
WHOLE = [prefill("a", A[:3]), prefill("a", A[3:6], 3), *ANSWER]
AGAIN = [prefill("a", A[:6]), prefill("a", A[6:], 6)]
PROMPT = asked(phases=("prefill",))


@pytest.mark.parametrize(
    ("test", "reference", "spec", "other", "fault", "note"),
    [
        # Everything was asked for.
        (WHOLE[:2], WHOLE, asked(phases=("prefill", "decode")), ALL, "6–9", None),
        (WHOLE[:2], [*WHOLE, *AGAIN], asked(phases=("prefill", "decode")), ALL, "6–9", None),
        (WHOLE[:2], WHOLE, asked(steps=tuple(range(50))), ALL, "6–9", None),
        # The phase was.
        (WHOLE[:1], WHOLE, PROMPT, PROMPT, "3–5", None),
        (WHOLE[:1], WHOLE, PROMPT, ALL, "3–5", "6–9"),
        (WHOLE[1:], WHOLE, PROMPT, ALL, "0–2", "6–9"),
        ([*WHOLE[:3], *WHOLE[4:]], WHOLE, asked(phases=("decode",)), ALL, "7", "0–5"),
        # It was not, or need not have been: the other run made an answer in the prompt's step, or began again.
        (WHOLE, WHOLE, PROMPT, ALL, None, "6–9"),
        (WHOLE, [prefill("a", A)], PROMPT, PROMPT, None, "6–9"),
        (WHOLE, [*WHOLE, prefill("a", A)], PROMPT, PROMPT, None, "6–9"),
        (WHOLE, [*WHOLE, *AGAIN], PROMPT, ALL, None, "6–9"),
        ([prefill("a", A[4:6], 4, A[:4]), *ANSWER], WHOLE, asked(phases=("decode",)), ALL, None, "0–5"),
        ([prefill("a", A[4:6], 4, A[:4]), *ANSWER], WHOLE, PROMPT, ALL, None, "6–9"),
        # The same of steps, which other runs number in another way.
        (WHOLE, WHOLE, asked(steps=(0, 1, 2)), ALL, None, "7–9"),
        (WHOLE, [prefill("a", A)], asked(steps=(0, 1)), asked(steps=(0, 1)), None, "6–9"),
        (WHOLE, [prefill("a", A)], asked(steps=(1, 4)), ALL, None, "0–2, 6–7, 9"),
    ],
)
def test_a_filter_excuses_what_it_may_have_left_out(tmp_path, test, reference, spec, other, fault, note):
    test = write(tmp_path / "t", *test, spec=spec)
    outcome = compare_captures(test, write(tmp_path / "r", *reference, spec=other))
    found = {
        item.severity: item.detail.removeprefix("the test has no rows of positions ").partition(", as")[0]
        for item in outcome.findings
        if item.kind == "missing positions"
    }
    expected = {Severity.FAULT: fault, Severity.NOTE: note}
    assert found == {severity: positions for severity, positions in expected.items() if positions}
    assert outcome.passed is (fault is None)


def test_a_step_that_was_lost_is_no_step_left_out(tmp_path):
    spec = asked(steps=tuple(range(6)))
    write(tmp_path / "t", *WHOLE, spec=spec)
    for file in sorted((tmp_path / "t" / "dp0" / "decode_s1_3").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (tmp_path / "t" / "dp0" / "decode_s1_3").rmdir()
    (fault,) = compare_captures(tmp_path / "t", write(tmp_path / "r", *WHOLE, spec=spec)).findings
    assert fault.detail == "the test has no rows of positions 7" and fault.severity is Severity.FAULT


@pytest.mark.parametrize(
    ("patterns", "kept", "ids", "passes"),
    [
        (("*",), "a", "ab", False),
        (("x", "**"), "x", "ab", False),
        (("a", "b"), "a", "ab", False),
        (("a",), "a", "ab", True),
        (("x*",), "x1", "ab", True),
        (("request-0", "request-1"), "request-0", ("request-1", "request-0"), True),
    ],
)
def test_a_filter_of_requests_excuses_those_it_may_not_take(tmp_path, patterns, kept, ids, passes):
    """Runs that number requests by themselves number them in their own order."""
    first, second = ids
    reference = write(tmp_path / "r", prefill(first, A), prefill(second, B))
    test = write(tmp_path / "t", prefill(kept, A), spec=asked(requests=patterns))
    outcome = compare_captures(test, reference)
    assert [(item.kind, item.where) for item in outcome.findings] == [("request without a pair", second)]
    assert outcome.passed is passes


def test_a_request_that_the_baseline_lacks_is_said_to_lack_there(tmp_path):
    both = prefill("a", A), prefill("b", B)
    test, reference = write(tmp_path / "t", *both, wrong=[1]), write(tmp_path / "r", *both)
    baseline = write(tmp_path / "b", *both, spec=asked(requests=("a",)))
    (found,) = compare_captures(test, reference, baseline).findings
    assert (found.where, found.severity) == ("b", Severity.NOTE)
    assert "none of the baseline's begins with its tokens, so it is not compared" in found.detail
    longer = write(tmp_path / "l", *both, decode("a", [60], 10))
    (found,) = compare_captures(reference, reference, longer).faults
    assert found.detail == "the test has no rows of positions 10"


@pytest.mark.parametrize(
    ("side", "other", "spec", "passes"),
    [
        ("made", "made", ALL, False),
        ("made", "other", ALL, True),
        ("made", "made", CaptureSpec(("m",), tensors=("*",)), True),
    ],
)
def test_a_module_that_only_one_of_a_kind_has_is_a_fault(tmp_path, side, other, spec, passes):
    test = write(tmp_path / "t", prefill("a", A), modules=("m",), spec=spec, kind=side)
    reference = write(tmp_path / "r", prefill("a", A), modules=("m", "n", "o"), kind=other)
    outcome = compare_captures(test, reference)
    assert outcome.passed is passes and outcome.data["unpaired"]["reference"] == ["n:output.0", "o:output.0"]
    if not passes:
        (fault,) = outcome.faults
        assert (fault.kind, fault.where) == ("missing module", "n")
        assert fault.detail == "the test lacks 2 modules that the reference has and it was asked for: n, o"


def test_a_module_of_a_phase_that_one_run_has_not_is_no_loss(tmp_path):
    """As experts, which a step may pass by."""
    test = write(tmp_path / "t", prefill("a", A[:9]), decode("a", [9], 9), modules=("m", "n"), without=[0])
    assert compare_captures(test, write(tmp_path / "r", prefill("a", A))).passed


@pytest.mark.parametrize("tokens", [True, False])
def test_rows_of_requests_that_a_step_lost_are_a_fault(tmp_path, tokens):
    """Where the other run has them at the same positions, or a decode step made none."""
    layouts = {"head:output.0": TensorLayout(rows=Rows.REQUESTS)}
    test = write(
        tmp_path / "t", *WHOLE, modules=("m", "head"), layouts=layouts, without=[1, 2] if tokens else [1]
    )
    reference = write(tmp_path / "r", *WHOLE, modules=("m", "head"), layouts={} if tokens else layouts)
    (fault,) = compare_captures(test, reference).faults
    assert (fault.kind, fault.where) == ("missing step", "head:output.0")


def test_a_chunk_of_a_prompt_need_not_have_rows_of_requests(tmp_path):
    layouts = {"head:output.0": TensorLayout(rows=Rows.REQUESTS)}
    test = write(tmp_path / "t", *WHOLE, modules=("m", "head"), layouts=layouts, without=[0])
    outcome = compare_captures(test, write(tmp_path / "r", *WHOLE, modules=("m", "head")))
    assert outcome.passed and [item.kind for item in outcome.findings] == ["missing step"]
