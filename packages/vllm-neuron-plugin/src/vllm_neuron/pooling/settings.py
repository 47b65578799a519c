# SPDX-License-Identifier: Apache-2.0
"""Settings of a server that embeds which this engine cannot honour, refused by name before weights load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_core.errors import ConfigError
from vllm_neuron.checks import Refusal
from vllm_neuron.config import NeuronConfig, neuron_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["POOLING_REFUSALS", "check_pooling", "is_pooling"]

GENERATION_ONLY = ("on_device_sampling", "max_consecutive_prefills", "kv_scales")
"""Keys of ``neuron_config`` that mean nothing where no token is drawn."""


def _pooler(setting: str, works: tuple[object, ...], hint: str) -> Refusal:
    name = f"--pooler-config.{setting}"
    return Refusal(name, lambda c: getattr(c.model_config.pooler_config, setting), works, hint)


POOLING_REFUSALS = (
    _pooler("task", (None, "embed"), "only texts as a whole are embedded; use embed"),
    _pooler("tok_pooling_type", ("ALL", None), "only texts as a whole are embedded; leave it out"),
    _pooler("enable_chunked_processing", (False,), "not supported; leave it off and shorten the text"),
    _pooler("logit_mean", (None,), "there are no classes; leave it out"),
    _pooler("logit_sigma", (None,), "there are no classes; leave it out"),
    _pooler("step_tag_id", (None,), "only texts as a whole are embedded; leave it out"),
    _pooler("returned_token_ids", (None,), "only texts as a whole are embedded; leave it out"),
    Refusal(
        "--kv-cache-dtype",
        lambda c: c.cache_config.cache_dtype.startswith("fp8") and c.cache_config.cache_dtype,
        (False,),
        "not supported with --runner pooling; use auto",
    ),
    Refusal(
        "--enable-chunked-prefill",
        lambda c: (
            c.scheduler_config.enable_chunked_prefill and not c.model_config.is_chunked_prefill_supported
        ),
        (False,),
        "this pooling needs all tokens of a text in one step; leave it off",
    ),
    Refusal(
        "--enable-prefix-caching",
        lambda c: c.cache_config.enable_prefix_caching and not c.model_config.is_prefix_caching_supported,
        (False,),
        "this pooling needs all tokens of a text in one step; leave it off",
    ),
)


def is_pooling(vllm_config: VllmConfig) -> bool:
    """Whether the server is one that embeds."""
    model_config = vllm_config.model_config
    return model_config is not None and model_config.runner_type == "pooling"


def check_pooling(vllm_config: VllmConfig) -> None:
    """Raise ``ConfigError`` for the first setting a server that embeds cannot honour; others pass."""
    if not is_pooling(vllm_config):
        return
    for refusal in POOLING_REFUSALS:
        value = refusal.read(vllm_config)
        if value not in refusal.works:
            raise ConfigError(refusal.setting, value, refusal.hint)
    settings, default = neuron_config(vllm_config), NeuronConfig()
    for name in GENERATION_ONLY:
        if getattr(settings, name) != getattr(default, name):
            hint = "a pooling model draws no token; leave it out"
            raise ConfigError(f"neuron_config.{name}", getattr(settings, name), hint)
