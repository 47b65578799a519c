# SPDX-License-Identifier: Apache-2.0
"""What every process of an engine does before it reads a model's configuration."""

from __future__ import annotations

import logging

from vllm import envs
from vllm.logger import init_logger

from vllm_neuron.models import register_models
from vllm_neuron.patches import apply_patches

__all__ = ["prepare_process"]

logger = init_logger(f"vllm.{__name__}")

OUR_LOGGERS = ("neuron_core", "neuron_parallel", "neuron_models")


def prepare_process() -> None:
    """Register models and apply the patches of vLLM, if this plugin's platform is the one in use."""
    from vllm.platforms import current_platform

    from vllm_neuron.platform import NeuronPlatform

    if not isinstance(current_platform, NeuronPlatform):
        logger.warning("vllm-neuron-plugin is installed but not used: %s", _why_not_used(current_platform))
        return
    apply_patches()
    register_models()
    _adopt_loggers()


def _why_not_used(platform: object) -> str:
    if envs.VLLM_TARGET_DEVICE == "cpu":
        return "VLLM_TARGET_DEVICE=cpu makes vLLM take its own CPU backend; unset it"
    if envs.VLLM_PLUGINS is not None and "neuron" not in envs.VLLM_PLUGINS:
        return f"VLLM_PLUGINS={','.join(envs.VLLM_PLUGINS)} leaves it out; add neuron"
    return f"vLLM chose {type(platform).__name__}"


def _adopt_loggers() -> None:
    """Send our packages' log lines where vLLM's go: it configures no logger but its own."""
    source = logging.getLogger("vllm")
    for name in OUR_LOGGERS:
        target = logging.getLogger(name)
        if not target.handlers:
            target.handlers = list(source.handlers)
            target.setLevel(source.level)
