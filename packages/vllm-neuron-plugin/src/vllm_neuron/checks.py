# SPDX-License-Identifier: Apache-2.0
"""vLLM settings this engine cannot honour, refused by name before weights load.

The table is data: each row says where a setting is, which values work, and what to do instead. A row that a
later version supports is deleted, not bypassed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from neuron_core.errors import ConfigError
from neuron_models import registry
from neuron_models.pooling import check_pooling_model
from neuron_parallel import ParallelPlan
from vllm_neuron.config import neuron_config

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = [
    "BLOCK_SIZE_MULTIPLE",
    "REFUSALS",
    "SUPPORTED_DTYPES",
    "Refusal",
    "check_model",
    "check_settings",
    "kv_dtype",
    "refusals_markdown",
]

SUPPORTED_DTYPES = (torch.bfloat16, torch.float32)
FP8_NAMES = ("fp8", "fp8_e4m3")
BLOCK_SIZE_MULTIPLE = 16
"""KV block sizes are multiples of this many tokens."""

DEFAULT_MAX_LOGPROBS = 20
"""vLLM's: it starts with a smaller vocabulary too."""

LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")
EXECUTORS = ("mp", "uni")

Read = Callable[[Any], object]


@dataclass(frozen=True)
class Refusal:
    """One setting: refused when ``read`` gives anything but one of ``works``."""

    setting: str
    read: Read
    works: tuple[object, ...]
    hint: str


def _one_rank(setting: str, field: str) -> Refusal:
    hint = "not supported; use 1 and spread the model with --tensor-parallel-size"
    return Refusal(setting, lambda c: getattr(c.parallel_config, field), (1,), hint)


def _off(setting: str, read: Read, hint: str = "not supported; leave it off") -> Refusal:
    return Refusal(setting, read, (False, None), hint)


def _unset(setting: str, read: Read, hint: str = "not supported; leave it out") -> Refusal:
    return Refusal(setting, lambda c: _given(read(c)), (None,), hint)


def _given(value: object) -> object:
    # Configuration objects print pages; their class says what was given.
    return value if value is None or isinstance(value, str | int | float | list) else type(value).__name__


REFUSALS = (
    _one_rank("--pipeline-parallel-size", "pipeline_parallel_size"),
    _one_rank("--prefill-context-parallel-size", "prefill_context_parallel_size"),
    _one_rank("--decode-context-parallel-size", "decode_context_parallel_size"),
    Refusal(
        "--data-parallel-size",
        lambda c: c.parallel_config.data_parallel_size,
        (1,),
        "not supported; use 1 and start one server per replica",
    ),
    Refusal(
        "--nnodes", lambda c: c.parallel_config.nnodes, (1,), "not supported; use 1: one host serves a model"
    ),
    Refusal(
        "--distributed-executor-backend",
        lambda c: _executor(c.parallel_config.distributed_executor_backend),
        EXECUTORS,
        "not supported; use mp (one process per rank) or uni (tensor-parallel size 1)",
    ),
    _off("--enable-expert-parallel", lambda c: c.parallel_config.enable_expert_parallel),
    _off("--enable-eplb", lambda c: c.parallel_config.enable_eplb),
    _off("--enable-elastic-ep", lambda c: c.parallel_config.enable_elastic_ep),
    _off("--enable-dbo", lambda c: c.parallel_config.enable_dbo),
    _off("--enable-batch-sharded-sampling", lambda c: c.parallel_config.enable_batch_sharded_sampling),
    _unset(
        "--enable-lora",
        lambda c: c.lora_config,
        "LoRA is not supported; merge the adapter into the checkpoint",
    ),
    _unset("--speculative-config", lambda c: c.speculative_config),
    _unset("--diffusion-config", lambda c: c.diffusion_config),
    _unset("--watermark-config", lambda c: c.watermark_config),
    _unset("--kv-transfer-config", lambda c: c.kv_transfer_config),
    _unset("--ec-transfer-config", lambda c: c.ec_transfer_config),
    _unset("--weight-transfer-config", lambda c: c.weight_transfer_config),
    _unset("--kv-offloading-size", lambda c: c.cache_config.kv_offloading_size),
    Refusal(
        "--kv-offloading-backend",
        lambda c: c.cache_config.kv_offloading_backend,
        ("native",),
        "the KV cache is not offloaded; leave it out",
    ),
    Refusal(
        "--prefix-cache-retention-interval",
        lambda c: c.cache_config.prefix_cache_retention_interval,
        (0, None),
        "for sliding-window and Mamba layers, which no model here has; use 0",
    ),
    _unset(
        "--kv-cache-dtype-skip-layers",
        lambda c: c.cache_config.kv_cache_dtype_skip_layers or None,
        "all layers have one kind of cache; leave it out",
    ),
    _off("--kv-sharing-fast-prefill", lambda c: c.cache_config.kv_sharing_fast_prefill),
    Refusal(
        "--cpu-offload-gb",
        lambda c: c.offload_config.uva.cpu_offload_gb,
        (0,),
        "not supported; use 0 and a larger --tensor-parallel-size if the weights do not fit",
    ),
    Refusal(
        "--offload-group-size",
        lambda c: c.offload_config.prefetch.offload_group_size,
        (0,),
        "not supported; use 0 and a larger --tensor-parallel-size if the weights do not fit",
    ),
    Refusal(
        "--offload-num-in-group",
        lambda c: c.offload_config.prefetch.offload_num_in_group,
        (1,),
        "weights are not offloaded; leave it out",
    ),
    Refusal(
        "--offload-prefetch-step",
        lambda c: c.offload_config.prefetch.offload_prefetch_step,
        (1,),
        "weights are not offloaded; leave it out",
    ),
    _unset("--offload-params", lambda c: sorted(c.offload_config.prefetch.offload_params) or None),
    Refusal(
        "--offload-backend",
        lambda c: c.offload_config.offload_backend,
        ("auto",),
        "weights are not offloaded; use auto",
    ),
    _unset("--cpu-offload-params", lambda c: sorted(c.offload_config.uva.cpu_offload_params) or None),
    Refusal(
        "--safetensors-load-strategy",
        lambda c: c.load_config.safetensors_load_strategy,
        (None, "prefetch"),
        "files are always read slice by slice, ahead of use; leave it out",
    ),
    _unset("--model-loader-extra-config", lambda c: _given(c.load_config.model_loader_extra_config or None)),
    _off("--enable-return-routed-experts", lambda c: c.aux_output_config.enable_return_routed_experts),
    Refusal(
        "--profiler-config.profiler",
        lambda c: c.profiler_config.profiler,
        ("torch", None),
        "needs a GPU; use torch",
    ),
    Refusal(
        "--profiler-config.torch_profiler_activities",
        lambda c: c.profiler_config.torch_profiler_activities,
        (["CPU"], None),
        "torch sees no other device here; leave it out",
    ),
    Refusal(
        "--profiler-config.torch_profiler_dir",
        lambda c: "://" in c.profiler_config.torch_profiler_dir and c.profiler_config.torch_profiler_dir,
        (False,),
        "must be a folder of this host; give a path",
    ),
    _off("--profiler-config.capture_torch_profiler", lambda c: c.profiler_config.capture_torch_profiler),
    _off(
        "--profiler-config.detailed_trace_annotation",
        lambda c: c.profiler_config.detailed_trace_annotation,
        "no such annotations; each step says its bucket, requests and tokens anyway, so leave it off",
    ),
    Refusal(
        "--load-format",
        lambda c: str(c.load_config.load_format),
        LOAD_FORMATS,
        "not supported; use auto with a safetensors checkpoint",
    ),
)

MODEL_REFUSALS = (
    Refusal(
        "--runner",
        lambda c: c.model_config.runner_type,
        ("generate", "pooling"),
        "not supported; use generate, or pooling for embeddings",
    ),
    Refusal(
        "--convert",
        lambda c: c.model_config.convert_type,
        ("none", "embed", "classify"),
        "not supported; leave it out: the checkpoint's head decides what a pooling model gives",
    ),
    _unset(
        "--quantization",
        lambda c: c.model_config.quantization,
        "not supported (also when the checkpoint asks for it); use the bfloat16 or float32 checkpoint",
    ),
    Refusal(
        "--dtype",
        lambda c: str(c.model_config.dtype).removeprefix("torch."),
        tuple(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES),
        "not supported; use bfloat16 or float32",
    ),
    Refusal(
        "--model-impl",
        lambda c: str(getattr(c.model_config.model_impl, "value", c.model_config.model_impl)),
        ("auto", "vllm"),
        "this plugin brings its own models; use auto",
    ),
    Refusal(
        "--enable-prompt-embeds",
        lambda c: c.model_config.enable_prompt_embeds and c.model_config.runner_type,
        (False, "generate"),
        "only prompts of text generation may be embeddings; leave it off with --runner pooling",
    ),
    _off("--enable-sleep-mode", lambda c: c.model_config.enable_sleep_mode),
    _off("--enable-cumem-allocator", lambda c: c.model_config.enable_cumem_allocator),
    _off("--return-sampling-mask", lambda c: c.model_config.return_sampling_mask),
    _off("--enable-trace-replay", lambda c: c.model_config.enable_trace_replay),
    Refusal(
        "--logits-processors",
        lambda c: (c.model_config.runner_type == "pooling" and c.model_config.logits_processors) or None,
        (None,),
        "a pooling model draws no token; leave it out",
    ),
    Refusal(
        "neuron_config.tensor_capture",
        lambda c: neuron_config(c).observes and c.model_config.runner_type,
        (False, "generate"),
        "as tensor_replacement and input_snapshots, of text generation alone; leave them out with --runner pooling",
    ),
    Refusal(
        "--logprobs-mode",
        lambda c: str(getattr(c.model_config.logprobs_mode, "value", c.model_config.logprobs_mode)),
        ("raw_logprobs", "raw_logits"),
        "not supported; use raw_logprobs or raw_logits",
    ),
    Refusal(
        "--max-model-len",
        lambda c: c.model_config.original_max_model_len == -1 and "auto",
        (False,),
        "shapes follow from the length, so it must be known before memory is measured; give a number",
    ),
    Refusal(
        "--model",
        lambda c: c.model_config.multimodal_config is not None and c.model_config.architecture,
        (False,),
        "multimodal models are not supported; use a text model",
    ),
)


def _executor(backend: object) -> object:
    return backend if isinstance(backend, str) else getattr(backend, "__name__", backend)


def check_settings(vllm_config: VllmConfig) -> None:
    """Raise ``ConfigError`` for the first setting this engine cannot honour."""
    has_model = vllm_config.model_config is not None
    if has_model:
        # Before the table: for some types vLLM sets other flags of it by itself.
        _check_kv_cache_dtype(vllm_config)
    for refusal in REFUSALS + (MODEL_REFUSALS if has_model else ()):
        value = refusal.read(vllm_config)
        if value not in refusal.works:
            raise ConfigError(refusal.setting, value, refusal.hint)
    _check_block_size(vllm_config)
    if has_model:
        _check_chunking(vllm_config)
        _check_max_logprobs(vllm_config.model_config)
        _check_logits_processors(vllm_config.model_config)


def _check_logits_processors(model_config: ModelConfig) -> None:
    # vLLM loads them once the weights are loaded.
    named = model_config.logits_processors
    if named:
        from vllm_neuron.runner.processors import has_custom_processors

        try:
            has_custom_processors(model_config)
        except Exception as error:  # a module of the user may raise anything
            hint = f"cannot be loaded ({error}); name classes of vLLM's LogitsProcessor as module:Class"
            raise ConfigError("--logits-processors", named, hint) from error


def _check_max_logprobs(model_config: ModelConfig) -> None:
    # vLLM holds requests against this limit, and the limit against nothing.
    limit, vocab_size = model_config.max_logprobs, model_config.get_vocab_size()
    if model_config.runner_type == "generate" and limit > max(vocab_size, DEFAULT_MAX_LOGPROBS):
        hint = f"the model has {vocab_size} tokens; use at most {vocab_size}, or -1 for all"
        raise ConfigError("--max-logprobs", limit, hint)


def _check_block_size(vllm_config: VllmConfig) -> None:
    size = vllm_config.cache_config.block_size
    if size % BLOCK_SIZE_MULTIPLE:
        lower = max(size - size % BLOCK_SIZE_MULTIPLE, BLOCK_SIZE_MULTIPLE)
        works = dict.fromkeys((lower, lower + BLOCK_SIZE_MULTIPLE))
        hint = f"must be a multiple of {BLOCK_SIZE_MULTIPLE}; {' and '.join(map(str, works))} work"
        raise ConfigError("--block-size", size, hint)
    unit = vllm_config.cache_config.prefix_match_unit
    if unit not in (None, size):
        hint = f"prefix hits are whole blocks; use {size} (--block-size) or leave it out"
        raise ConfigError("--prefix-match-unit", unit, hint)


def _check_kv_cache_dtype(vllm_config: VllmConfig) -> None:
    dtype = vllm_config.cache_config.cache_dtype
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    works = ("auto", *((model_dtype,) if model_dtype == "bfloat16" else ()), *FP8_NAMES)
    if dtype not in works:
        hint = (
            f"the cache holds the model's own type ({model_dtype}) or 8-bit floats; use {' or '.join(works)}"
        )
        raise ConfigError("--kv-cache-dtype", dtype, hint)


def kv_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """What a checked ``--kv-cache-dtype`` stands for: the model's own dtype or ``torch.float8_e4m3fn``."""
    if vllm_config.cache_config.cache_dtype in FP8_NAMES:
        return torch.float8_e4m3fn
    dtype: torch.dtype = vllm_config.model_config.dtype
    return dtype


def check_model(vllm_config: VllmConfig) -> None:
    """Raise ``ConfigError`` unless ``neuron_models`` has the model and can spread it over the ranks.

    The message lists the supported architectures, the sizes that divide, or the error of importing the model.
    """
    plan = ParallelPlan(tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size)
    check = check_pooling_model if vllm_config.model_config.runner_type == "pooling" else registry.check_model
    check(vllm_config.model_config.hf_config, plan)


def _check_chunking(vllm_config: VllmConfig) -> None:
    # vLLM checks this where a user sets the length, not where the length comes from the model.
    scheduler = vllm_config.scheduler_config
    max_model_len = vllm_config.model_config.max_model_len
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < max_model_len:
        hint = f"without chunked prefill a whole prompt (max_model_len={max_model_len}) must fit one step; "
        raise ConfigError(
            "--max-num-batched-tokens",
            scheduler.max_num_batched_tokens,
            hint + f"use at least {max_model_len}",
        )


def refusals_markdown() -> str:
    """The refused settings as a Markdown table: the source of the table in ``docs/refusals.md``."""
    rows = ["| setting | values that work | otherwise |", "|---|---|---|"]
    for refusal in REFUSALS + MODEL_REFUSALS:
        values = [str(value).lower() for value in refusal.works if value not in (None, False)]
        works = ", ".join(f"`{value}`" for value in values) or "–"
        rows.append(f"| `{refusal.setting}` | {works} | {refusal.hint} |")
    return "\n".join(rows) + "\n"
