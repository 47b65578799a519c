# SPDX-License-Identifier: Apache-2.0
"""What the engine cannot honour stops the start before weights load, naming flag, value and what works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from vllm.config.cache import CacheDType

from neuron_core.errors import ConfigError
from vllm_neuron import checks

ROOT = Path(__file__).parents[4]

REFUSED = [
    ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
    ({"data_parallel_size": 2}, "--data-parallel-size"),
    ({"enable_lora": True}, "--enable-lora='LoRAConfig': LoRA is not supported; merge the adapter"),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "--speculative-config='SpeculativeConfig': not supported; leave it out",
    ),
    # Case N6 of the public reports: a connector that saves and never loads.
    (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "--kv-transfer-config",
    ),
    ({"kv_offloading_size": 1.0}, "--kv-offloading-size=1.0"),
    ({"cpu_offload_gb": 1.0}, "--cpu-offload-gb=1.0"),
    ({"offload_backend": "uva"}, "--offload-backend='uva'"),
    ({"cpu_offload_params": {"a"}}, "--cpu-offload-params=['a']"),
    ({"offload_params": {"a"}}, "--offload-params=['a']: not supported; leave it out"),
    ({"offload_prefetch_step": 2}, "--offload-prefetch-step=2: weights are not offloaded; leave it out"),
    ({"offload_num_in_group": 2}, "--offload-num-in-group=2: weights are not offloaded; leave it out"),
    (
        {"kv_offloading_backend": "lmcache"},
        "--kv-offloading-backend='lmcache': the KV cache is not offloaded",
    ),
    ({"prefix_match_unit": 8}, "--prefix-match-unit=8: prefix hits are whole blocks; use 16 (--block-size)"),
    (
        {"prefix_match_unit": 16, "block_size": 32},
        "--prefix-match-unit=16: prefix hits are whole blocks; use 32",
    ),
    ({"prefix_cache_retention_interval": 64}, "--prefix-cache-retention-interval=64: for sliding-window"),
    ({"safetensors_load_strategy": "eager"}, "--safetensors-load-strategy='eager'"),
    ({"model_loader_extra_config": {"x": 1}}, "--model-loader-extra-config="),
    (
        {"enable_prompt_embeds": True, "runner": "pooling"},
        "--enable-prompt-embeds='pooling': only prompts of text generation",
    ),
    ({"runner": "draft"}, "--runner='draft': not supported; use generate, or pooling for embeddings"),
    (
        {"runner": "pooling", "convert": "classify"},
        "--convert='classify': the checkpoint's head decides",
    ),
    ({"dtype": "float16"}, "--dtype='float16': not supported; use bfloat16 or float32"),
    ({"block_size": 24}, "--block-size=24: must be a multiple of 16; 16 and 32 work"),
    ({"block_size": 8}, "--block-size=8: must be a multiple of 16; 16 and 32 work"),
    ({"load_format": "pt"}, "--load-format='pt': not supported; use auto with a safetensors checkpoint"),
    ({"max_model_len": -1}, "--max-model-len='auto'"),
    ({"max_logprobs": 257}, "--max-logprobs=257: the model has 256 tokens; use at most 256, or -1 for all"),
    (
        {"logprobs_mode": "processed_logprobs"},
        "--logprobs-mode='processed_logprobs': not supported; use raw_logprobs or raw_logits",
    ),
    (
        {"profiler_config": {"profiler": "cuda"}},
        "--profiler-config.profiler='cuda': needs a GPU; use torch",
    ),
    (
        {"profiler_config": {"profiler": "torch", "torch_profiler_dir": "s3://team/traces"}},
        "--profiler-config.torch_profiler_dir='s3://team/traces': must be a folder of this host",
    ),
    (
        {
            "profiler_config": {
                "profiler": "torch",
                "torch_profiler_dir": "traces",
                "torch_profiler_activities": ["CUDA"],
            }
        },
        "--profiler-config.torch_profiler_activities=['CUDA']: torch sees no other device",
    ),
    (
        {"logits_processors": ["some.module:Processor"]},
        "--logits-processors=['some.module:Processor']: cannot be loaded",
    ),
    ({"logits_processors": ["collections:OrderedDict"]}, "must be a subclass of LogitsProcessor"),
    (
        {"logits_processors": ["some.module:Processor"], "runner": "pooling"},
        "--logits-processors=['some.module:Processor']: a pooling model draws no token",
    ),
    (
        {
            "runner": "pooling",
            "additional_config": {"neuron_config": {"input_snapshots": {"folder": "x", "steps": [0]}}},
        },
        "neuron_config.tensor_capture='pooling': as tensor_replacement and input_snapshots, of text generation alone",
    ),
    ({"worker_cls": "some.Worker"}, "--worker-cls='some.Worker': not supported; leave it out"),
    ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls"),
    ({"compilation_config": {"mode": 3}}, "--compilation-config.mode"),
    ({"compilation_config": {"cudagraph_mode": "FULL"}}, "--compilation-config.cudagraph_mode"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", get_args(CacheDType))
def test_every_type_of_the_cache_is_taken_or_refused_with_those_that_work(make_config, name, dtype):
    works = ["auto", *(["bfloat16"] if dtype == "bfloat16" else []), "fp8", "fp8_e4m3"]
    if name in works:
        assert make_config(dtype=dtype, kv_cache_dtype=name).cache_config.cache_dtype == name
        return
    with pytest.raises(Exception) as caught:
        make_config(dtype=dtype, kv_cache_dtype=name)
    message = str(caught.value)
    assert f"--kv-cache-dtype='{name}': the cache holds the model's own type ({dtype})" in message
    assert f"use {' or '.join(works)}" in message


@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_refused_by_name(make_config, arguments, message):
    with pytest.raises(Exception) as caught:
        make_config(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 2}, "Pipeline parallelism is not supported for this model"),
        ({"enable_sleep_mode": True}, "Sleep mode is not supported"),
        ({"enable_eplb": True}, "Expert parallelism load balancing is only supported"),
        ({"decode_context_parallel_size": 2}, "dcp_size=2"),
        ({"distributed_executor_backend": "ray"}, "ray"),
        ({"tensor_parallel_size": 3}, "attention heads"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "max_num_batched_tokens (64)"),
        ({"max_num_seqs": 256}, "max_num_batched_tokens (128)"),
    ],
    ids=str,
)
def test_refused_by_vllm_before_us(make_config, arguments, message):
    with pytest.raises(Exception) as caught:
        make_config(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "--pipeline-parallel-size=2: not supported; use 1"),
        ("parallel_config", "decode_context_parallel_size", 2, "--decode-context-parallel-size=2"),
        ("parallel_config", "enable_eplb", True, "--enable-eplb=True: not supported; leave it off"),
        ("parallel_config", "enable_expert_parallel", True, "--enable-expert-parallel=True"),
        ("parallel_config", "distributed_executor_backend", "ray", "--distributed-executor-backend='ray'"),
        ("parallel_config", "nnodes", 2, "--nnodes=2"),
        ("model_config", "enable_sleep_mode", True, "--enable-sleep-mode=True"),
        ("model_config", "quantization", "fp8", "--quantization='fp8'"),
        ("model_config", "model_impl", "transformers", "--model-impl='transformers'"),
        ("aux_output_config", "enable_return_routed_experts", True, "--enable-return-routed-experts=True"),
    ],
)
def test_refused_by_us_whatever_vllm_thinks(make_config, section, field, value, message):
    # Set behind vLLM's back: its own checks of these depend on the model and may change.
    config = make_config()
    setattr(getattr(config, section), field, value)
    with pytest.raises(ConfigError) as caught:
        checks.check_settings(config)
    assert message in str(caught.value)


def test_load_formats_are_those_the_worker_can_load():
    from vllm_neuron.weights import FORMATS

    assert sorted(checks.LOAD_FORMATS) == sorted(FORMATS)


def test_three_ranks_do_not_divide_the_model(make_config):
    config = make_config()
    config.parallel_config.tensor_parallel_size = 3
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=3: does not divide 4 attention heads.*use 1, 2 or 4"
    ):
        checks.check_model(config)


def test_chunking_off_with_a_budget_below_the_model_length_names_the_budget(make_config):
    config = make_config()
    config.scheduler_config.enable_chunked_prefill = False
    config.scheduler_config.max_num_batched_tokens = 64
    with pytest.raises(
        ValueError, match=r"--max-num-batched-tokens=64: .*max_model_len=128.*use at least 128"
    ):
        checks.check_settings(config)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"block_size": 16},
        {"block_size": 32},
        {"prefix_match_unit": 16},
        {"max_logprobs": 256},
        {"max_logprobs": -1},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_what_works_is_kept(make_config, arguments):
    config = make_config(**arguments)
    assert config.cache_config.block_size == arguments.get("block_size", 16)
    assert config.cache_config.cache_dtype == arguments.get("kv_cache_dtype", "auto")


@pytest.mark.parametrize(("asked", "expected"), [(None, False), (False, False), (True, True)])
def test_async_scheduling_is_off_on_the_cpu_device_unless_asked_for(make_config, asked, expected):
    assert make_config(async_scheduling=asked).scheduler_config.async_scheduling is expected


def test_float16_checkpoint_is_served_as_bfloat16(make_config, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        dtype="float16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    from vllm import EngineArgs

    config = EngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64
    ).create_engine_config()
    assert config.model_config.dtype is torch.bfloat16


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "NoSuchForCausalLM"])
def test_unknown_architecture_lists_those_supported(tmp_path, architecture):
    from transformers import LlamaConfig
    from vllm import EngineArgs

    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        architectures=[architecture],
    ).save_pretrained(tmp_path)
    with pytest.raises(
        Exception,
        match=rf"architectures=\['{architecture}'\]: is not supported; use one of .*LlamaForCausalLM",
    ):
        EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()


def test_architecture_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    from transformers import LlamaConfig
    from vllm import EngineArgs
    from vllm.model_executor.models import ModelRegistry

    from neuron_models import registry

    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    registry.register("BrokenForCausalLM", "no_such_package_of_models:Broken")
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        architectures=["BrokenForCausalLM"],
    ).save_pretrained(tmp_path)
    with pytest.raises(Exception, match="No module named 'no_such_package_of_models'"):
        EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()


def test_second_model_runner_is_refused(make_config, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(Exception, match="VLLM_USE_V2_MODEL_RUNNER"):
        make_config()


def test_device_flag_no_longer_exists(tiny_llama):
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(tiny_llama),
        "--device",
        "neuron",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode != 0
    assert "--device" in done.stderr + done.stdout


def test_the_page_holds_the_generated_tables():
    from vllm_neuron.admission import admission_markdown

    page = (ROOT / "docs" / "refusals.md").read_text()
    assert checks.refusals_markdown() in page
    assert admission_markdown() in page
