# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints as static-shape programs."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_models.loading import LoadStats, load_weights
    from neuron_models.registry import (
        ModelFactory,
        build_model,
        check_model,
        register,
        resolve,
        supported_architectures,
    )

__all__ = [
    "LoadStats",
    "ModelFactory",
    "__version__",
    "build_model",
    "check_model",
    "load_weights",
    "register",
    "resolve",
    "supported_architectures",
]

__version__ = "0.1.0"

_LOADING = ("LoadStats", "load_weights")


def __getattr__(name: str) -> Any:
    """Import on first use: `neuron --help` imports this package for the help of its command."""
    if name in __all__:
        home = "neuron_models.loading" if name in _LOADING else "neuron_models.registry"
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
