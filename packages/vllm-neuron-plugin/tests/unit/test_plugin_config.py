# SPDX-License-Identifier: Apache-2.0
"""``neuron_config`` is parsed strictly, and the bucket plan follows from the engine's limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from neuron_core.errors import ConfigError
from vllm_neuron.config import NeuronConfig, bucket_plan, reference_markdown

ROOT = Path(__file__).parents[4]


def parse(**settings: object) -> NeuronConfig:
    return NeuronConfig.from_additional_config({"neuron_config": settings})


def test_defaults():
    assert NeuronConfig.from_additional_config({}) == parse() == NeuronConfig()


def test_every_key_is_taken(tmp_path):
    scales = tmp_path / "scales.safetensors"
    scales.touch()
    config = parse(
        prefill_buckets=[16, 64],
        decode_buckets=[1, 4],
        decode_context_length_buckets=[128],
        max_prefill_seqs=2,
        max_consecutive_prefills=3,
        compiler="fx",
        kv_scales=str(scales),
        on_device_sampling=False,
    )
    assert config == NeuronConfig((16, 64), (1, 4), (128,), 2, 3, "fx", str(scales), False)
    hash(config)


def test_null_means_the_default_where_there_is_one_to_work_out():
    lists = {"prefill_buckets": None, "decode_buckets": None, "decode_context_length_buckets": None}
    assert parse(**lists, max_prefill_seqs=None) == NeuronConfig()
    assert parse(decode_context_length_buckets=[]) != NeuronConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"prefil_buckets": [128]},
            "neuron_config.prefil_buckets=[128]: unknown key; did you mean 'prefill_buckets'?",
        ),
        ({"zzz": 1}, "neuron_config.zzz=1: unknown key; valid names are compiler, decode_buckets, "),
        (
            {"prefill_buckets": 128},
            "neuron_config.prefill_buckets=128: must be a list of whole numbers; [128, 256",
        ),
        ({"prefill_buckets": [True]}, "must be a list of whole numbers"),
        (
            {"decode_context_length_buckets": "512"},
            "neuron_config.decode_context_length_buckets='512': must be a list of whole numbers",
        ),
        ({"decode_buckets": ["1"]}, "neuron_config.decode_buckets=['1']: must be a list of whole numbers"),
        (
            {"max_prefill_seqs": 0},
            "neuron_config.max_prefill_seqs=0: must be a whole number of at least 1; 1 works",
        ),
        ({"max_prefill_seqs": 1.0}, "must be a whole number"),
        ({"max_consecutive_prefills": None}, "must be a whole number"),
        (
            {"compiler": "inducter"},
            "neuron_config.compiler='inducter': no such compiler; did you mean 'inductor'?",
        ),
        ({"on_device_sampling": 1}, "neuron_config.on_device_sampling=1: must be true or false"),
    ],
)
def test_a_wrong_setting_is_named_with_what_works(settings, message):
    with pytest.raises(ConfigError) as caught:
        parse(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        (
            {"neuron_confg": {}},
            "additional_config.neuron_confg={}: unknown key; did you mean 'neuron_config'?",
        ),
        ({"neuron_config": [1]}, "additional_config.neuron_config=[1]: must be a JSON object"),
        ("x", "additional_config='x': must be a JSON object"),
    ],
)
def test_the_surrounding_object_is_checked_too(additional, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        NeuronConfig.from_additional_config(additional)


def test_plan_follows_the_engine_limits(make_config):
    plan = bucket_plan(
        make_config(max_model_len=200, max_num_seqs=6, max_num_batched_tokens=512, block_size=32)
    )
    assert (plan.prefill_tokens, plan.decode_seqs) == ((64, 128, 192, 200), (1, 2, 4, 6))
    assert (plan.max_prefill_seqs, plan.block_size, plan.context_len) == (6, 32, 224)
    assert plan.decode_contexts == ()


def test_decode_contexts_are_chosen_from_the_length_listed_or_switched_off(make_config):
    limits = {"max_model_len": 2000, "hf_overrides": {"max_position_embeddings": 2000}}
    for neuron, contexts in [
        ({}, (512, 1024)),
        ({"decode_context_length_buckets": None}, (512, 1024)),
        ({"decode_context_length_buckets": [128, 1920]}, (128, 1920)),
        ({"decode_context_length_buckets": []}, ()),
    ]:
        plan = bucket_plan(make_config(**limits, additional_config={"neuron_config": neuron}))
        assert plan.decode_contexts == contexts
        names = {bucket.name for bucket in plan.all() if bucket.name.startswith("decode_b4")}
        ends = [f"_c{context}" for context in (*contexts, 2000)] if contexts else [""]
        assert names == {f"decode_b4{end}" for end in ends}


@pytest.mark.parametrize(("context", "largest"), [("LLM_CLASS", 8192), ("OPENAI_API_SERVER", 2048)])
def test_plan_of_a_model_of_131072_positions_stays_small(tmp_path, context, largest):
    # The length is the model's own; what bounds the shapes is the budget of a step.
    from transformers import LlamaConfig
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config(
        UsageContext[context]
    )
    plan = bucket_plan(config)
    assert config.model_config.max_model_len == plan.context_len == 131072
    assert plan.prefill_tokens == tuple(
        size
        for size in (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
        if size <= largest
    )
    assert plan.decode_seqs == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    # Four times as far from one to the next: twice would be nine contexts for each of nine sizes.
    assert plan.decode_contexts == (512, 2048, 8192, 32768)
    assert len(plan.all()) == len(plan.prefill_tokens) + 9 * 5 + 1


@pytest.mark.parametrize(
    ("neuron", "message"),
    [
        ({"prefill_buckets": [64, 32, 128]}, "prefill_buckets=[64, 32, 128]: must be strictly ascending"),
        ({"prefill_buckets": [64]}, "prefill_buckets=[64]: must end exactly at 128"),
        ({"decode_buckets": [1, 2]}, "decode_buckets=[1, 2]: must end exactly at 4 (max_num_seqs)"),
        ({"decode_buckets": [1, 8]}, "decode_buckets=[1, 8]: must end exactly at 4 (max_num_seqs)"),
        (
            {"decode_context_length_buckets": [128]},
            "decode_context_length_buckets=[128]: must stay below 128 (max_model_len)",
        ),
        (
            {"decode_context_length_buckets": [64, 32]},
            "decode_context_length_buckets=[64, 32]: must be strictly ascending; [32, 64] works",
        ),
        (
            {"decode_context_length_buckets": [64, 64]},
            "decode_context_length_buckets=[64, 64]: must be strictly ascending; [64] works",
        ),
        (
            {"decode_context_length_buckets": [40]},
            "decode_context_length_buckets=[40]: 40 is not a multiple of 16 (the block size, 16); [48] works",
        ),
        ({"max_prefill_seqs": 5}, "max_prefill_seqs=5: must not exceed max_num_seqs; use 4 or less"),
    ],
)
def test_a_plan_that_does_not_fit_stops_the_start(make_config, neuron, message):
    with pytest.raises(ValueError) as caught:
        make_config(additional_config={"neuron_config": neuron})
    assert message in str(caught.value)


def test_configuration_can_be_settled_twice(make_config):
    # vLLM settles the configuration again in the engine process.
    config = make_config(additional_config={"neuron_config": {"prefill_buckets": [64, 128]}})
    before = (bucket_plan(config), config.parallel_config.worker_cls, config.scheduler_config.scheduler_cls)
    config.__post_init__()
    after = (bucket_plan(config), config.parallel_config.worker_cls, config.scheduler_config.scheduler_cls)
    assert (
        before
        == after
        == (before[0], "vllm_neuron.worker.NeuronWorker", "vllm_neuron.scheduler.NeuronScheduler")
    )


def test_the_page_holds_the_generated_table():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert reference_markdown() in page
