# SPDX-License-Identifier: Apache-2.0
"""Architecture name to model: looked up by name, imported only when used, open to models of other
packages.
"""

import importlib
from typing import Protocol, cast

import torch
from transformers import PretrainedConfig

from neuron_core.errors import ConfigError
from neuron_core.prompt_embeds import EmbedsModel
from neuron_core.protocols import StaticModel
from neuron_parallel import ParallelGroups, ParallelPlan


class ModelFactory(Protocol):
    """What a registered name leads to; usually the model class itself, with both as class methods."""

    def check(self, config: PretrainedConfig, plan: ParallelPlan) -> None:
        """Raise `ConfigError` naming the field if the model cannot honour ``config`` under ``plan``."""

    def from_config(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        groups: ParallelGroups,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> StaticModel:
        """Make the model with unfilled weights; ``kv_dtype`` is that of the cache, ``dtype`` if not given."""


_factories: dict[str, str | ModelFactory] = {
    "BertForSequenceClassification": "neuron_models.bert:BertForSequenceClassification",
    "BertModel": "neuron_models.bert:BertModel",
    "LlamaForCausalLM": "neuron_models.llama:LlamaForCausalLM",
    "LlamaForSequenceClassification": "neuron_models.llama:LlamaForCausalLM",
    "LlamaModel": "neuron_models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "neuron_models.qwen3:Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification": "neuron_models.qwen3:Qwen3ForCausalLM",
    "Qwen3Model": "neuron_models.qwen3:Qwen3ForCausalLM",
}


def register(architecture: str, factory: str | ModelFactory) -> None:
    """Serve ``architecture`` (a name in a config's ``architectures``) with ``factory``, replacing any before
    it.

    A string ``"module:attribute"`` is imported on first use. Call this from a plugin's entry point.
    """
    if isinstance(factory, str) and not all(factory.partition(":")):
        raise ConfigError("factory", factory, "must look like 'package.module:attribute'")
    _factories[architecture] = factory


def supported_architectures() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_factories))


def resolve(config: PretrainedConfig) -> ModelFactory:
    """The factory of the first architecture of ``config`` that is registered.

    Raises `ConfigError` listing those supported, or with the import error if the registered module has one.
    """
    names = config.architectures or []
    known = next((name for name in names if name in _factories), None)
    if known is None:
        raise ConfigError(
            "architectures", names, f"is not supported; use one of {', '.join(supported_architectures())}"
        )
    target = _factories[known]
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    try:
        return cast(ModelFactory, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        others = ", ".join(name for name in supported_architectures() if name != known)
        cause = f"{type(error).__name__}: {error}"
        hint = f"could not be imported from {target!r} ({cause}); others are {others}"
        raise ConfigError("architectures", names, hint) from error


def check_model(config: PretrainedConfig, plan: ParallelPlan) -> None:
    """Raise `ConfigError` unless the model of ``config`` can be served under ``plan``. Allocates nothing."""
    resolve(config).check(config, plan)


def build_model(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    groups: ParallelGroups,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
    prompt_embeds: bool = False,
) -> StaticModel:
    """Check ``config`` and make its model with unfilled weights; see `ModelFactory.from_config`.

    With ``prompt_embeds`` its programs take embeddings beside token ids; `ConfigError` if the model has none that do.
    """
    factory = resolve(config)
    factory.check(config, groups.plan)
    model = factory.from_config(config, dtype=dtype, groups=groups, block_size=block_size, kv_dtype=kv_dtype)
    if prompt_embeds:
        if not isinstance(model, EmbedsModel):
            hint = f"{type(model).__name__} takes token ids alone; leave it off"
            raise ConfigError("--enable-prompt-embeds", prompt_embeds, hint)
        model.takes_prompt_embeds = True
    return model
