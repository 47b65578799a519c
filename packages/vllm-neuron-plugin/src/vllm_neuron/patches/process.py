# SPDX-License-Identifier: Apache-2.0
"""Changes of the process as a whole: its environment, and calls of torch."""

from __future__ import annotations

import torch
from vllm import envs

from neuron_core.environ import export

__all__ = ["MODEL_RUNNER_VARIABLE", "pin_model_runner", "quiet_accelerator_cache"]

MODEL_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def pin_model_runner() -> None:
    """Set ``VLLM_USE_V2_MODEL_RUNNER=0`` unless the user has set it (1 is refused by the platform)."""
    if envs.VLLM_USE_V2_MODEL_RUNNER is None:
        export({MODEL_RUNNER_VARIABLE: "0"})


def quiet_accelerator_cache() -> None:
    """Make ``torch.accelerator``'s cache calls no-ops where torch has no accelerator."""
    if torch.accelerator.is_available():
        return
    for name in ("empty_cache", "empty_host_cache"):
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, _nothing_to_empty)


def _nothing_to_empty() -> None:
    return None
