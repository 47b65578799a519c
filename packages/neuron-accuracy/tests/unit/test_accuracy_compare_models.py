# SPDX-License-Identifier: Apache-2.0
"""Faults planted in a tiny random model of transformers, and what is no fault."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from neuron_accuracy.capture.hooks import capture_modules
from neuron_accuracy.capture.records import RunRecord
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.compare.captures import compare_captures

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.1,
)
SPEC = CaptureSpec(
    ("model.embed_tokens", "model.layers.*", "model.norm", "lm_head"), tensors=("output.*", "input.0")
)
LAYER = "model.layers.2"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(torch.bfloat16).state_dict()


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(128, (1, size), generator=generator) for size in (40, 17, 55)]


@pytest.fixture(scope="module")
def run(weights, prompts, tmp_path_factory):
    """Capture a model with a fault in it; in one step per prompt, or in chunks that use the KV cache."""

    def capture(dtype=torch.bfloat16, fault=None, chunk=None, seed=0):
        model = LlamaForCausalLM(CONFIG).eval()
        model.load_state_dict(weights)
        model.to(dtype)
        if fault is not None:
            with torch.no_grad():
                fault(model)
        folder = tmp_path_factory.mktemp("run")
        record = RunRecord(captures.info(dtype=str(dtype), vocab_size=128), 1)
        with torch.no_grad(), capture_modules(model, SPEC, CaptureWriter(folder, SPEC, record)):
            for ids in prompts[seed:] + prompts[:seed]:
                past = None
                for part in ids.split(chunk or ids.shape[1], 1):
                    past = model(part, past_key_values=past, use_cache=True).past_key_values
        return folder

    return capture


@pytest.fixture(scope="module")
def truth(run):
    return run(torch.float32)


@pytest.fixture(scope="module")
def rounded(run):
    return run()


def scaled_row(model):
    model.get_submodule(f"{LAYER}.self_attn.q_proj").weight[17] *= 1.02


def swapped_kv_heads(model):
    weight = model.get_submodule(f"{LAYER}.self_attn.v_proj").weight
    weight[:] = weight.roll(16, 0)


def rope_base(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.pow(1.3)


class NarrowSum(nn.Module):
    """Sums its products in bfloat16."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        total = torch.zeros(*x.shape[:-1], self.weight.shape[0], dtype=torch.bfloat16)
        for k in range(x.shape[-1]):
            total = total + x[..., k : k + 1] * self.weight[:, k]
        return total


def narrow_sum(model):
    mlp = model.get_submodule(f"{LAYER}.mlp")
    mlp.down_proj = NarrowSum(mlp.down_proj.weight)


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (scaled_row, f"{LAYER}.self_attn.q_proj:output.0, only channel 17"),
        (swapped_kv_heads, f"{LAYER}.self_attn.v_proj:output.0"),
        (rope_base, "model.layers.0.self_attn:output.0"),
        (narrow_sum, f"{LAYER}.mlp.down_proj:output.0"),
    ],
)
@pytest.mark.parametrize("ways", ["two", "three"])
def test_a_fault_is_named_where_it_was_planted(run, truth, rounded, fault, where, ways):
    wrong = run(fault=fault)
    outcome = compare_captures(wrong, rounded, truth) if ways == "three" else compare_captures(wrong, rounded)
    assert outcome.faults, [(row["name"], row["rel_l2"]) for row in outcome.data["modules"]]
    assert outcome.faults[0].where == where


@pytest.mark.parametrize("fault", [scaled_row, swapped_kv_heads, rope_base])
def test_a_fault_is_named_against_float32_alone(run, truth, fault):
    outcome = compare_captures(run(fault=fault), truth)
    names = {"scaled_row": "q_proj", "swapped_kv_heads": "v_proj", "rope_base": "layers.0.self_attn"}
    assert names[fault.__name__] in outcome.faults[0].where


@pytest.mark.parametrize(("chunk", "seed"), [(None, 1), (16, 2)])
def test_chunks_order_and_rounding_are_no_fault(run, truth, rounded, chunk, seed):
    other = run(chunk=chunk, seed=seed)
    for outcome in (
        compare_captures(other, truth),
        compare_captures(other, rounded),
        compare_captures(other, rounded, truth),
        compare_captures(run(torch.float32, chunk=chunk, seed=seed), truth),
    ):
        assert outcome.passed, outcome.faults
        assert len(outcome.data["modules"]) > 60
