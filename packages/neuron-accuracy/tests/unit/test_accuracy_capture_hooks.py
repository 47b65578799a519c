# SPDX-License-Identifier: Apache-2.0
"""Hooks take what the modules of a plain model computed, by request and position."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from neuron_accuracy.capture.hooks import ROOT, capture_modules
from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.layout import Rows, TensorLayout

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

PROMPTS = ([5, 6, 7], [1, 2, 3, 4, 5])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def taps(model, folder, *modules, tensors=("output.*",), layouts=None):
    spec = CaptureSpec(modules, tensors=tensors)
    return capture_modules(
        model, spec, CaptureWriter(folder, spec, RunRecord(captures.info(), 1, layouts or {}))
    )


def test_a_padded_batch_that_decodes_is_taken_by_request_and_position(model, tmp_path):
    padded = torch.tensor([[0, 0, *PROMPTS[0]], PROMPTS[1]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    with taps(model, tmp_path, "model.layers.1", "model.embed_tokens", "model.norm"):
        out = model.generate(padded, attention_mask=mask, max_new_tokens=3, do_sample=False)
    capture = Capture(tmp_path)
    assert [(step.phase, len(step.rows)) for step in capture.steps()] == [
        ("prefill", 2),
        ("decode", 2),
        ("decode", 2),
    ]
    assert capture.modules() == ("model.embed_tokens", "model.layers.1", "model.norm")
    for row, prompt in enumerate(PROMPTS):
        tokens = [*prompt, *out[row, 5:].tolist()]
        with torch.no_grad():
            hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        for step in capture.steps():
            held = step.rows[row]
            assert held.request == f"request-{row}"
            assert list(held.token_ids) == [tokens[position] for position in held.positions]
            rows = (held.begin, held.begin + len(held.positions))
            for module, expected in (("model.embed_tokens", hidden[0]), ("model.norm", hidden[-1])):
                found = capture.load(module, "output.0", step, rows=rows)
                torch.testing.assert_close(found, expected[0, list(held.positions)], atol=1e-5, rtol=1e-5)


def test_new_prompts_are_new_requests_and_positions_may_be_given(model, tmp_path):
    with taps(model, tmp_path, "model.norm"), torch.no_grad():
        model(torch.tensor([[3, 4]]))
        model(torch.tensor([[8, 9]]), position_ids=torch.tensor([[7, 8]]))
    rows = [row for step in Capture(tmp_path).steps() for row in step.rows]
    assert [(row.request, row.positions, row.token_ids) for row in rows] == [
        ("request-0", (0, 1), (3, 4)),
        ("request-1", (7, 8), (8, 9)),
    ]


def test_inputs_are_named_by_place_however_they_are_passed(model, tmp_path):
    with taps(
        model, tmp_path, "model.layers.0.self_attn", "model.layers.0.input_layernorm", tensors=("*put.0",)
    ):
        model(torch.tensor([PROMPTS[1]]))
    capture = Capture(tmp_path)
    step = capture.steps()[0]
    given = capture.load("model.layers.0.self_attn", "input.0", step)
    assert torch.equal(given, capture.load("model.layers.0.input_layernorm", "output.0", step))


@dataclass
class Pair:
    left: torch.Tensor
    right: tuple[torch.Tensor, dict[str, torch.Tensor]]


class Many(nn.Module):
    def forward(self, x, *, flag=None):
        return Pair(x + 1, (x + 2, {"deep": x + 3}))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.many = Many()
        self.twice = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        y = self.many(x).left
        y = self.twice(self.twice(y))
        return {"y": y.add_(0)}


ROW = StepRow("a", 0, 0, (0, 1), (5, 6))
STEP = StepRecord(0, "prefill_s3", "prefill", 3, 1, (ROW,))


def test_all_outputs_of_any_kind_are_taken_and_a_second_call_apart(tmp_path):
    model, x = Model(), torch.randn(3, 4)
    with taps(model, tmp_path, "**") as hooks, torch.no_grad():
        hooks.announce(STEP)
        model(x)
    capture = Capture(tmp_path)
    step = capture.steps()[0]
    assert step == STEP
    assert set(capture.tensors("many", step)) == {"output.left", "output.right.0", "output.right.1.deep"}
    assert torch.equal(capture.load("many", "output.right.1.deep", step), x + 3)
    once, twice = (capture.load("twice", name, step) for name in ("output.0", "output.0@1"))
    with torch.no_grad():
        torch.testing.assert_close(once, model.twice(x + 1))
        torch.testing.assert_close(twice, model.twice(model.twice(x + 1)))
    assert set(capture.tensors(ROOT, step)) == {"output.y"}


def test_what_is_written_over_later_is_kept_as_it_was(tmp_path):
    class Over(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Identity()

        def forward(self, x):
            return self.first(x).mul_(100)

    x = torch.randn(3, 4)
    before = x.clone()
    model = Over()
    with taps(model, tmp_path, "first") as hooks:
        hooks.announce(STEP)
        model(x)
    capture = Capture(tmp_path)
    assert torch.equal(capture.load("first", "output.0", capture.steps()[0]), before)


@pytest.mark.parametrize("everywhere", [True, False])
def test_what_has_no_rows_is_left_out_with_a_warning_unless_declared(model, tmp_path, everywhere):
    ids = torch.tensor([PROMPTS[1]])
    with (
        taps(model, tmp_path / "a", "lm_head"),
        pytest.warns(UserWarning, match=r"lm_head:output\.0 .* not captured"),
    ):
        model(ids, logits_to_keep=1)
    phase = "" if everywhere else "@prefill"
    layouts = {f"lm_head:output.0{phase}": TensorLayout(rows=Rows.REQUESTS)}
    with taps(model, tmp_path / "b", "lm_head", layouts=layouts), torch.no_grad():
        logits = model(ids, logits_to_keep=1).logits
    capture = Capture(tmp_path / "b")
    assert torch.equal(capture.load("lm_head", "output.0", capture.steps()[0]), logits[0])


def test_hooks_are_gone_after_the_block_and_after_an_error(model, tmp_path):
    with (
        pytest.raises(CaptureError, match=r"no module matches model\.layer\.\*"),
        taps(model, tmp_path, "model.layer.*"),
    ):
        pass
    with pytest.raises(RuntimeError, match="stop"), taps(model, tmp_path / "b", "model.norm"):
        raise RuntimeError("stop")
    assert not model._forward_pre_hooks and not model.model.norm._forward_hooks
    other = Model()
    with pytest.raises(CaptureError, match="announce the step"), taps(other, tmp_path / "c", "**"):
        other(torch.randn(3, 4))
