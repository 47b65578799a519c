# SPDX-License-Identifier: Apache-2.0
"""The model of an engine before its weights are read: what a worker fills, and what an estimate measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from neuron_core.errors import ConfigError
from neuron_core.protocols import StaticModel
from neuron_models.attention import fit_to_chip
from neuron_models.pooling import build_model_for
from vllm_neuron.checks import kv_dtype
from vllm_neuron.config import bucket_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from neuron_core.devices.chips import ChipSpec
    from neuron_parallel import ParallelGroups

__all__ = ["unfilled_model"]


def unfilled_model(vllm_config: VllmConfig, chip: ChipSpec | None, groups: ParallelGroups) -> StaticModel:
    """The model with the cache type, buckets and inputs that the engine was asked for.

    Raises ``ConfigError`` if the model has no cache of that type.
    """
    config, wanted = vllm_config.model_config, kv_dtype(vllm_config)
    model = build_model_for(
        bucket_plan(vllm_config),
        config.hf_text_config,
        dtype=config.dtype,
        groups=groups,
        kv_dtype=wanted,
        prompt_embeds=config.enable_prompt_embeds,
    )
    if any(layout.dtype != wanted for layout in model.kv_layouts):
        hint = f"{type(model).__name__} has no cache of that type; use auto"
        raise ConfigError("--kv-cache-dtype", vllm_config.cache_config.cache_dtype, hint)
    fit_to_chip(cast(nn.Module, model), chip)
    return model
