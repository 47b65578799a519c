# SPDX-License-Identifier: Apache-2.0
"""Changes of what vLLM does before an engine is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_neuron.patches.wrapping import wrapping

__all__ = ["check_architectures_first", "default_async_scheduling"]


def check_architectures_first() -> None:
    """Let vLLM's model registry refuse what this plugin has no model for."""
    from vllm.model_executor.models.registry import _ModelRegistry

    from vllm_neuron.models import check_architectures

    @wrapping(_ModelRegistry, "inspect_model_cls")
    def inspected(
        original: Callable[..., Any], self: Any, architectures: str | list[str], model_config: Any
    ) -> Any:
        check_architectures([architectures] if isinstance(architectures, str) else architectures)
        return original(self, architectures, model_config)


def default_async_scheduling() -> None:
    """Take the default of ``async_scheduling`` from the platform."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    @wrapping(EngineArgs, "create_engine_config")
    def created(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.async_scheduling is None:
            self.async_scheduling = current_platform.default_async_scheduling()
        return original(self, *args, **kwargs)
