# SPDX-License-Identifier: Apache-2.0
"""The engine as a subject of neuron-accuracy, as far as no engine is needed: refusals, scores, snapshots that fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from neuron_accuracy.capture.records import RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.errors import SubjectError
from neuron_accuracy.layout import Rows, TensorLayout
from neuron_accuracy.snapshots.spec import SnapshotSpec
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_core.errors import CompileError, ConfigError
from neuron_core.graphs.program import Part, Program
from vllm_neuron.accuracy.refusals import request_refusals
from vllm_neuron.accuracy.settings import SnapshotSettings
from vllm_neuron.accuracy.snapshots import SnapshotTaker
from vllm_neuron.accuracy.subject import _captured_scores, open_engine

PROMPT = (1, 2, 3)


def test_an_option_of_a_wrong_type_is_named(tmp_path):
    subject = open_engine(str(tmp_path), {"max_model_len": "abc"})
    with pytest.raises(SubjectError, match=r"max_model_len='abc': Input should be a valid integer"):
        subject.info()


@pytest.mark.parametrize("error", [OSError("no repo"), AttributeError("items"), AssertionError("no device")])
def test_whatever_vllm_raises_for_a_model_names_the_model(monkeypatch, tmp_path, error):
    def raises(self: Any) -> None:
        raise error

    monkeypatch.setattr(EngineArgs, "create_engine_config", raises)
    with pytest.raises(SubjectError, match=rf"vllm-neuron:{tmp_path}: {type(error).__name__}: {error}"):
        open_engine(str(tmp_path), {}).info()


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(SubjectError, match=r"vllm-neuron:\./nope: .*; give a folder, or a model that is in"):
        open_engine("./nope", {}).info()


def test_an_error_of_the_plugin_stays_what_it_is(monkeypatch, tmp_path):
    def raises(self: Any) -> None:
        raise ConfigError("neuron_config.compiler", "no", "fx works")

    monkeypatch.setattr(EngineArgs, "create_engine_config", raises)
    with pytest.raises(ConfigError, match="fx works"):
        open_engine(str(tmp_path), {}).info()


def test_the_value_of_an_unknown_option_that_may_be_secret_is_not_printed():
    with pytest.raises(ConfigError, match=r"unknown option") as caught:
        open_engine("./nope", {"api_key": "sk-1234"})
    assert "sk-1234" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("too long"), "the engine refuses a request: too long"),
        (VLLMValidationError("too long", value=65), r"the engine refuses a request: too long \(value=65\)"),
        (EngineDeadError(), "the engine failed: EngineCore encountered an issue"),
    ],
)
def test_what_an_engine_raises_for_a_request_is_an_error_of_the_subject(error, said):
    with pytest.raises(SubjectError, match=said), request_refusals():
        raise error


def captured(folder: Path, requests: list[tuple[tuple[int, ...], float]]) -> Path:
    """Requests of one step each, whose logits at every token's place have one number."""
    info = SubjectInfo("vllm-neuron", "m", "r", "float32", 10, "t")
    layouts = {"lm_head:output.0": TensorLayout(rows=Rows.TOKENS)}
    writer = CaptureWriter(folder, CaptureSpec(("lm_head",)), RunRecord(info, 1, layouts))
    for number, (tokens, value) in enumerate(requests):
        count = len(tokens)
        row = StepRow(f"request-{number}", 0, 0, tuple(range(count)), tokens)
        logits = torch.zeros(count, 10)
        logits[:, 5] = value
        step = StepRecord(number, f"prefill_s{count}", "prefill", count, 1, (row,))
        writer.write_step(step, {("lm_head", "output.0"): logits})
    writer.close()
    return folder


def scored(folder: Path, continuations: list[tuple[int, ...]]) -> list[float]:
    found = _captured_scores(folder, [PROMPT] * len(continuations), continuations, 0)
    assert all(scores.logits is not None for scores in found)
    return [float(scores.logits[-1, 5]) for scores in found if scores.logits is not None]


def test_equal_sequences_have_the_scores_of_requests_of_their_own(tmp_path):
    """The second may have met a block in the cache that the first left wrong."""
    folder = captured(tmp_path / "run", [(PROMPT, 0.0), (PROMPT, 99.0)])
    assert scored(folder, [(4,), (4,)]) == [0.0, 99.0]
    with pytest.raises(SubjectError, match="no request of the run computed a prompt of 3 tokens"):
        scored(folder, [(4,)] * 3)


def test_a_sequence_that_begins_another_has_the_scores_of_its_own_request(tmp_path):
    folder = captured(tmp_path / "run", [((*PROMPT, 4), 7.0), (PROMPT, 0.0)])
    assert scored(folder, [(4,), (4, 6)]) == [0.0, 7.0]


def test_a_graph_that_cannot_be_captured_ends_the_snapshots_and_not_the_engine(tmp_path):
    class Refusing:
        compiler = SimpleNamespace(name="fx")

        def capture(self, *_: Any) -> None:
            raise CompileError("part 'proj' cannot be captured")

    settings = SnapshotSettings(tmp_path, SnapshotSpec(steps=(0,)))
    taker = SnapshotTaker(settings, Refusing(), rank=0)  # type: ignore[arg-type]
    linear = nn.Linear(4, 4).requires_grad_(False)
    program = Program((Part("proj", linear, ("x",), ("y",)),), ("y",))
    bucket = SimpleNamespace(name="prefill_s4")
    batch = SimpleNamespace(bucket=bucket, starts=[0, 1], requests=[SimpleNamespace(request_id="r")])
    watch = taker.watch(program, batch, {"token_ids": torch.tensor([5])})  # type: ignore[arg-type]
    assert watch is not None
    inputs = [linear.weight, linear.bias, torch.ones(1, 4)]
    (given,) = watch(0, lambda given: [nn.functional.linear(given[2], given[0], given[1])], inputs)
    assert torch.equal(given, linear(inputs[2]))
    assert taker.problem == "part 'proj' cannot be captured"
