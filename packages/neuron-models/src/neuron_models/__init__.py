# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints as static-shape programs."""

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
