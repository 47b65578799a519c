# SPDX-License-Identifier: Apache-2.0
"""A server that embeds or classifies: what its settings become, and which of them are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from vllm.model_executor.models.interfaces_base import is_pooling_model, is_text_generation_model

from neuron_core.errors import ConfigError
from neuron_core.graphs.buckets import BucketPlan, Phase
from vllm_neuron.config import bucket_plan
from vllm_neuron.engine_record import EngineRecord
from vllm_neuron.models import stub_class
from vllm_neuron.pooling.settings import POOLING_REFUSALS, pooling_task

DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory):
    from transformers import BertConfig

    folder = tmp_path_factory.mktemp("bert-config")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    BertConfig(**sizes, vocab_size=256, architectures=["BertModel"]).save_pretrained(folder)
    return folder


def test_a_decoder_embeds_in_chunks_with_prefill_buckets_alone(make_config):
    config = make_config(runner="pooling")
    plan = bucket_plan(config)
    assert [bucket.name for bucket in plan.all()] == ["embed_s128", "embed_s64"]
    assert {bucket.phase for bucket in plan.all()} == {Phase.EMBED}
    assert config.scheduler_config.enable_chunked_prefill
    assert plan.prefill(1, 1).num_tokens == 64
    assert EngineRecord.of(config) != EngineRecord.of(make_config())


def test_an_encoder_computes_texts_whole_and_by_default_in_the_pooling_runner(make_config, tiny_bert):
    from vllm import EngineArgs

    config = EngineArgs(model=str(tiny_bert), max_model_len=128, dtype="float32").create_engine_config()
    assert config.model_config.runner_type == "pooling"
    assert not config.scheduler_config.enable_chunked_prefill
    assert not config.cache_config.enable_prefix_caching
    assert bucket_plan(config).max_prefill_tokens == 128


@pytest.mark.parametrize(
    ("architecture", "generates"),
    [
        ("LlamaForCausalLM", True),
        ("Qwen3Model", False),
        ("LlamaModel", False),
        ("BertModel", False),
        ("BertForSequenceClassification", False),
        ("Qwen3ForSequenceClassification", False),
    ],
)
def test_vllm_sees_who_cannot_generate(architecture, generates):
    stub = stub_class(architecture)
    assert is_text_generation_model(stub) == generates
    assert is_pooling_model(stub) == (not generates)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pooler_config": {"task": "token_embed"}}, "--pooler-config.task='token_embed'"),
        ({"pooler_config": {"tok_pooling_type": "STEP"}}, "--pooler-config.tok_pooling_type='STEP'"),
        (
            {"pooler_config": {"enable_chunked_processing": True}},
            "--pooler-config.enable_chunked_processing=True",
        ),
        ({"pooler_config": {"logit_mean": 1.0}}, "--pooler-config.logit_mean=1.0"),
        ({"pooler_config": {"logit_sigma": 1.0}}, "--pooler-config.logit_sigma=1.0"),
        ({"pooler_config": {"step_tag_id": 1}}, "--pooler-config.step_tag_id=1"),
        ({"pooler_config": {"returned_token_ids": [1]}}, "--pooler-config.returned_token_ids=[1]"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype='fp8': not supported with --runner pooling; use auto"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds='pooling': "),
        (
            {"pooler_config": {"pooling_type": "MEAN"}, "enable_chunked_prefill": True},
            "--enable-chunked-prefill=True: this pooling needs all tokens of a text in one step",
        ),
        (
            {"pooler_config": {"pooling_type": "CLS"}, "enable_prefix_caching": True},
            "--enable-prefix-caching=True: this pooling needs all tokens of a text in one step",
        ),
        (
            {"additional_config": {"neuron_config": {"decode_buckets": [4]}}},
            "decode_buckets=[4]: a pooling model decodes nothing; leave it out",
        ),
        (
            {"additional_config": {"neuron_config": {"decode_context_length_buckets": [64]}}},
            "decode_context_length_buckets=[64]: a pooling model decodes nothing",
        ),
        (
            {"additional_config": {"neuron_config": {"on_device_sampling": False}}},
            "neuron_config.on_device_sampling=False: a pooling model draws no token",
        ),
        (
            {"additional_config": {"neuron_config": {"max_consecutive_prefills": 2}}},
            "neuron_config.max_consecutive_prefills=2: a pooling model draws no token",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_by_name(make_config, arguments, message):
    with pytest.raises(Exception) as caught:
        make_config(runner="pooling", **arguments)
    assert message in str(caught.value)


@pytest.fixture(scope="session")
def configure_classifier(tiny_llama, tmp_path_factory):
    """``configure(**arguments)``: the engine configuration of a Llama that classifies, without weights."""
    from vllm import EngineArgs

    folder = tmp_path_factory.mktemp("classifier-config")
    found = json.loads((tiny_llama / "config.json").read_text())
    found |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    (folder / "config.json").write_text(json.dumps(found))
    for file in tiny_llama.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return lambda **arguments: EngineArgs(str(folder), max_model_len=128, **arguments).create_engine_config()


def test_a_checkpoint_with_a_head_classifies_and_is_calibrated(make_config, configure_classifier):
    config = configure_classifier(pooler_config={"logit_mean": 1.0, "logit_sigma": 2.0})
    assert config.model_config.runner_type == "pooling"
    assert pooling_task(config) == "classify"
    assert pooling_task(make_config(runner="pooling")) == "embed"
    for each in (config, configure_classifier(convert="classify")):
        assert each.model_config.score_type == "cross-encoder"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"convert": "embed"}, "--convert='embed': the checkpoint's head decides"),
        ({"pooler_config": {"task": "embed"}}, "--pooler-config.task='embed': the checkpoint's head decides"),
        (
            {"hf_overrides": {"classifier_from_token": ["no", "yes"]}},
            "classifier_from_token=['no', 'yes']: a head made of a language model's is not implemented",
        ),
    ],
    ids=["convert", "task", "classifier_from_token"],
)
def test_a_classifier_does_nothing_else(configure_classifier, arguments, message):
    with pytest.raises(Exception) as caught:
        configure_classifier(**arguments)
    assert message in str(caught.value)


def test_a_generating_server_needs_decode_buckets():
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "block_size": 16}
    with pytest.raises(ConfigError, match="decode_buckets"):
        BucketPlan.from_limits(**sizes, decode_buckets=[])


def test_the_page_names_every_refused_setting():
    page = (DOCS / "pooling.md").read_text()
    assert [refusal.setting for refusal in POOLING_REFUSALS if f"`{refusal.setting}`" not in page] == []
