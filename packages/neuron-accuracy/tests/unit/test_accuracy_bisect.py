# SPDX-License-Identifier: Apache-2.0
"""Bisection over a model of transformers: the module at fault, whatever kind it is of."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from neuron_accuracy.capture.records import RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.errors import AccuracyError, CaptureError, SubjectError
from neuron_accuracy.layout import Sharding, Slice, TensorLayout
from neuron_accuracy.replace.bisect import bisect, disagreement
from neuron_accuracy.replace.eager import ReplaceableTransformers
from neuron_accuracy.replace.parts import part_of
from neuron_accuracy.replace.source import ReferenceRows
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.transformers import TransformersSubject

PROMPTS = [[3, 14, 15, 92, 65, 35], [8, 97, 93]]
TOKENS = [[23, 84, 62], [64, 33, 83]]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def reference(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return captured(model, tmp_path_factory.mktemp("bisect") / "reference")


def captured(model: Any, folder: Path) -> tuple[Path, Any]:
    subject = TransformersSubject.of(model)
    subject.capture(PROMPTS, TOKENS, CaptureSpec(("**",)), folder)
    return folder, subject.force(PROMPTS, TOKENS, 0)


def found(model: Any, faults: dict[str, float], reference: tuple[Path, Any], **more: Any) -> Any:
    faulty = copy.deepcopy(model)
    for name, factor in faults.items():

        def fault(_: Any, args: Any, result: Any, factor: float = factor) -> Any:
            if isinstance(result, tuple):
                return tuple(item * factor if item.is_floating_point() else item for item in result)
            return result * factor

        faulty.get_submodule(name).register_forward_hook(fault)
    folder, expected = reference
    test = ReplaceableTransformers(TransformersSubject.of(faulty))
    return bisect(test, expected, folder, PROMPTS, TOKENS, limit=1e-4, **more)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens",
        "model.rotary_emb",
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
        "model.layers.1.mlp.act_fn",
        "model.layers.2.mlp.down_proj",
        "model.norm",
        "lm_head",
    ],
)
def test_a_fault_in_any_module_is_found(model, reference, name):
    outcome = found(model, {name: 1.05}, reference)
    assert not outcome.passed
    assert outcome.data["module"] == name
    assert "replacing it alone restores agreement" in outcome.findings[0].detail
    assert len(outcome.data["probes"]) <= 12, "halving, not trying each of some forty modules"


def test_of_several_faults_the_last_is_named_as_that(model, reference):
    faults = {"model.layers.0.mlp.down_proj": 1.05, "model.layers.2.self_attn.o_proj": 1.05}
    outcome = found(model, faults, reference)
    assert outcome.data["module"] == "model.layers.2.self_attn.o_proj"
    assert "it is the last of several" in outcome.findings[0].detail


def test_without_a_fault_nothing_is_replaced(model, reference):
    outcome = found(model, {}, reference)
    assert outcome.passed
    assert outcome.data["module"] is None
    assert [row["replaced"] for row in outcome.data["probes"]] == [0]


def test_a_fault_outside_of_the_candidates_is_in_no_module(model, reference):
    outcome = found(model, {"lm_head": 1.05}, reference, patterns=("model.layers.*",))
    assert not outcome.passed
    assert outcome.findings[0].kind == "not in any module"


@pytest.mark.filterwarnings("ignore:.* is not captured:UserWarning")
def test_each_call_of_a_module_gets_the_outputs_of_that_call(tmp_path):
    """The rotary table of Gemma 3 is called for each kind of layer, with another base."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    )
    model = Gemma3ForCausalLM(config).eval()
    reference = captured(model, tmp_path / "reference")
    test = ReplaceableTransformers(TransformersSubject.of(model))
    scores = test.force_replaced(PROMPTS, TOKENS, reference[0], ("**",), ["model.rotary_emb"])
    assert disagreement(scores, reference[1]) < 1e-6, "what the reference gave changes nothing"
    name = "model.layers.0.post_feedforward_layernorm"
    assert found(model, {name: 1.3}, reference).data["module"] == name


def test_a_module_that_runs_again_hides_no_fault_before_that(model, tmp_path):
    """The first norm is the last one too, so that its outputs make the logits agree wherever the fault is."""
    shared = copy.deepcopy(model)
    shared.model.norm = shared.model.layers[0].input_layernorm
    reference = captured(shared, tmp_path / "reference")
    name = "model.layers.1.mlp.down_proj"
    assert found(shared, {name: 1.3}, reference).data["module"] == name


@pytest.mark.filterwarnings("ignore:.* is not captured:UserWarning")
@pytest.mark.parametrize("name", ["gate", "experts"])
def test_the_router_and_the_experts_of_a_mixture_are_modules_like_others(mixture, name):
    """Their outputs are rows of tokens without a batch."""
    model, reference = mixture
    test = ReplaceableTransformers(TransformersSubject.of(model))
    folder, expected = reference
    everything = test.candidates(folder, ("**",))
    module = f"model.layers.1.mlp.{name}"
    assert module in everything
    scores = test.force_replaced(PROMPTS, TOKENS, folder, ("**",), everything)
    assert disagreement(scores, expected) < 1e-6
    assert found(model, {module: 1.3}, reference).data["module"] == module


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[MixtralForCausalLM, tuple[Path, Any]]:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_local_experts=7,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = MixtralForCausalLM(config).eval()
    return model, captured(model, tmp_path_factory.mktemp("mixture") / "reference")


def test_a_capture_of_another_model_is_named(model, mixture):
    folder = mixture[1][0]
    smaller = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "hidden_size": 16})).eval()
    test = ReplaceableTransformers(TransformersSubject.of(smaller))
    with pytest.raises(
        SubjectError, match=r"model\.norm:output\.0 has 16 numbers a token, and 32 in .* another model"
    ):
        test.force_replaced(PROMPTS, TOKENS, folder, ("**",), ["model.norm"])


def test_what_cannot_be_replaced_is_named(model, reference, tmp_path):
    folder, _ = reference
    test = ReplaceableTransformers(TransformersSubject.of(model))
    with pytest.raises(
        SubjectError, match=r"model\.layer\.1 cannot be replaced: did you mean 'model\.layers\.1'"
    ):
        test.force_replaced(PROMPTS, TOKENS, folder, ("**",), ["model.layer.1"])
    with pytest.raises(AccuracyError, match="has none of the modules"):
        found(model, {}, reference, patterns=("encoder.*",))
    with pytest.raises(CaptureError, match="no folder"):
        ReferenceRows(tmp_path / "nowhere")


def test_rows_are_those_of_a_request_with_the_same_tokens(model, reference):
    """A request that begins alike and goes on otherwise has the rows up to there, and none beyond."""
    source = ReferenceRows(reference[0])
    other = [*PROMPTS[0][:4], 1, 2]
    rows = source.rows("model.norm:output.0", other, range(6))
    assert [row is not None for row in rows] == [True] * 4 + [False] * 2
    with pytest.raises(CaptureError, match=r"has no model\.norms:output\.0; capture that module too"):
        source.rows("model.norms:output.0", other, range(1))


def test_requests_of_one_name_in_two_replicas_have_rows_of_their_own(tmp_path):
    """Replicas number their requests each from 0, and one may be given a name again."""
    info, texts = (
        SubjectInfo("transformers", "m", "r", "float32", 10, "t"),
        {0: [(1, 2), (5, 6)], 1: [(3, 4)]},
    )
    for dp, held in texts.items():
        writer = CaptureWriter(tmp_path, CaptureSpec(("m",)), RunRecord(info, 1), dp=dp)
        for number, tokens in enumerate(held):
            row = StepRow("request-0", 0, 0, (0, 1), tokens)
            step = StepRecord(number, "prefill_s2", "prefill", 2, 1, (row,))
            writer.write_step(step, {("m", "output.0"): torch.tensor([tokens]).float().T})
        writer.close()
    source = ReferenceRows(tmp_path)
    assert source.sequences() == [(1, 2), (5, 6), (3, 4)]
    for tokens in source.sequences():
        rows = source.rows("m:output.0", tokens, range(2))
        assert [row is not None and row.tolist() for row in rows] == [[token] for token in tokens]


def test_parts_of_ranks_make_the_whole():
    from neuron_accuracy.compare.whole import assemble

    whole = torch.arange(6 * 24.0).view(6, 24)
    fused = (Slice("q", 16), Slice("k", 4, replicas=2), Slice("v", 4, replicas=2))
    for layout in (
        TensorLayout(),
        TensorLayout(Sharding.SHARDED),
        TensorLayout(Sharding.SHARDED, dim=0),
        TensorLayout(Sharding.INTERLEAVED, dim=0),
        TensorLayout(Sharding.PARTIAL),
        TensorLayout(Sharding.SHARDED, slices=fused),
    ):
        ranks = 2 if not layout.slices else 4
        parts: list[Tensor] = [part_of(whole, layout, rank, ranks) for rank in range(ranks)]
        assert torch.equal(assemble(parts, layout), whole), layout
