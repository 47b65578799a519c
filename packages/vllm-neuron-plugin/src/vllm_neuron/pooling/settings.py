# SPDX-License-Identifier: Apache-2.0
"""Settings of a pooling server which this engine cannot honour, refused by name before weights load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_core.errors import ConfigError
from neuron_models.classification import SUFFIX
from vllm_neuron.checks import Refusal
from vllm_neuron.config import NeuronConfig, neuron_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["POOLING_REFUSALS", "check_pooling", "is_pooling", "pooling_task"]

GENERATION_ONLY = ("on_device_sampling", "max_consecutive_prefills", "kv_scales")
"""Keys of ``neuron_config`` that mean nothing where no token is drawn."""


def pooling_task(vllm_config: VllmConfig) -> str:
    """``classify`` if the checkpoint's architecture has a head for it, else ``embed``."""
    return "classify" if vllm_config.model_config.architecture.endswith(SUFFIX) else "embed"


def _another_task(vllm_config: VllmConfig, named: str | None) -> str | None:
    """``named`` if it is a task and not the model's."""
    return None if named in (None, "none", pooling_task(vllm_config)) else named


def _calibration(setting: str) -> Refusal:
    def read(vllm_config: VllmConfig) -> object:
        embeds = pooling_task(vllm_config) == "embed"
        return getattr(vllm_config.model_config.pooler_config, setting) if embeds else None

    return Refusal(f"--pooler-config.{setting}", read, (None,), "there are no classes; leave it out")


def _pooler(setting: str, works: tuple[object, ...], hint: str) -> Refusal:
    name = f"--pooler-config.{setting}"
    return Refusal(name, lambda c: getattr(c.model_config.pooler_config, setting), works, hint)


POOLING_REFUSALS = (
    Refusal(
        "--pooler-config.task",
        lambda c: _another_task(c, c.model_config.pooler_config.task),
        (None,),
        "the checkpoint's head decides between embed and classify, of texts as a whole; leave it out",
    ),
    Refusal(
        "--convert",
        lambda c: _another_task(c, c.model_config.convert_type),
        (None,),
        f"the checkpoint's head decides: classify if its architecture is a …{SUFFIX}, else embed; leave it out",
    ),
    _pooler("tok_pooling_type", ("ALL", None), "only texts as a whole are pooled; leave it out"),
    _pooler("enable_chunked_processing", (False,), "not supported; leave it off and shorten the text"),
    _calibration("logit_mean"),
    _calibration("logit_sigma"),
    _pooler("step_tag_id", (None,), "only texts as a whole are pooled; leave it out"),
    _pooler("returned_token_ids", (None,), "only texts as a whole are pooled; leave it out"),
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
    """Whether the server is one that embeds or classifies."""
    model_config = vllm_config.model_config
    return model_config is not None and model_config.runner_type == "pooling"


def check_pooling(vllm_config: VllmConfig) -> None:
    """Raise ``ConfigError`` for the first setting a pooling server cannot honour; others pass."""
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
