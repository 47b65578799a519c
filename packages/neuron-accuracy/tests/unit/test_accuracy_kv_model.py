# SPDX-License-Identifier: Apache-2.0
"""Faults planted in a real model, whose later layers compute with what the fault left them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.findings import Outcome, Severity
from neuron_accuracy.kv.compare import compare_caches
from neuron_accuracy.subjects.transformers import TransformersSubject

PROMPTS = [[(7 * i + 3 * n) % 97 for i in range(n)] for n in (40, 23)]


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama(dtype: torch.dtype, base: float = 10_000.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        initializer_range=0.08,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def captured(model: LlamaForCausalLM, folder: Path) -> Capture:
    subject = TransformersSubject.of(model, name="tiny")
    subject.capture(PROMPTS, [[] for _ in PROMPTS], CaptureSpec((), kv=True), folder)
    return Capture(folder)


def compared(tmp_path: Path, dtype: torch.dtype, plant: Callable[[LlamaForCausalLM], None]) -> Outcome:
    model = llama(dtype)
    with torch.no_grad():
        plant(model)
    return compare_caches(captured(model, tmp_path / "test"), captured(llama(dtype), tmp_path / "reference"))


def swap_heads(model: LlamaForCausalLM) -> None:
    attention = model.model.layers[2].self_attn
    for weight in (attention.k_proj.weight, attention.v_proj.weight):
        weight.copy_(weight.roll(16, dims=0))


def double_keys(model: LlamaForCausalLM) -> None:
    model.model.layers[3].self_attn.k_proj.weight.mul_(2)


def change_value_row(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.v_proj.weight[21].mul_(3)


each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@each_dtype
@pytest.mark.parametrize(
    "plant, kind, where, follow",
    [
        (swap_heads, "swapped heads", "keys and values of layer 2, head 0", "layers 3-4"),
        (double_keys, "gain", "keys of layer 3", "layer 4"),
        (change_value_row, "diverges", "values of layer 1, head 1", "layers 2-4"),
    ],
)
def test_a_fault_is_named_where_it_begins_and_the_rest_follows(tmp_path, dtype, plant, kind, where, follow):
    outcome = compared(tmp_path, dtype, plant)
    assert (outcome.faults[0].kind, outcome.faults[0].where.split(", pos")[0].split(", 3")[0]) == (
        kind,
        where,
    )
    assert {finding.kind for finding in outcome.faults} == {kind}
    notes = [finding for finding in outcome.findings if finding.severity is Severity.NOTE]
    assert [note.kind for note in notes] == ["follows", "other weights"]
    assert notes[0].where == follow


@each_dtype
def test_another_rotary_base_is_named_though_later_layers_differ_for_it(tmp_path, dtype):
    test = captured(llama(dtype, base=500_000.0), tmp_path / "test")
    outcome = compare_caches(test, captured(llama(dtype), tmp_path / "reference"))
    (fault,) = outcome.faults
    assert (fault.kind, fault.where) == ("rotary", "keys of all layers")
    assert fault.detail.startswith(
        "keys from layer 0 on diverge with position, position 0 agrees: rotary base"
    )
    assert "in 2 of 2 requests" in fault.detail


def test_a_model_in_bfloat16_agrees_with_itself_in_float32(tmp_path):
    outcome = compare_caches(
        captured(llama(torch.bfloat16), tmp_path / "test"),
        captured(llama(torch.float32), tmp_path / "reference"),
    )
    assert [finding.kind for finding in outcome.findings] == ["other weights"]  # rounded ones
    errors = next(m for m in outcome.data["heat_maps"] if m["title"] == "Relative L2 error of keys")
    assert all(0 < error < 0.05 for row in errors["values"] for error in row)
