# SPDX-License-Identifier: Apache-2.0
"""Graph passes, in the order they run: device rewrite, alias analysis, in-place to out-of-place."""

from __future__ import annotations

import torch

from neuron_core.graphs.passes.alias import AliasAnalysis
from neuron_core.graphs.passes.device_rewrite import DeviceRewrite
from neuron_core.graphs.passes.manager import PassManager
from neuron_core.graphs.passes.out_of_place import OutOfPlace

__all__ = ["AliasAnalysis", "DeviceRewrite", "OutOfPlace", "PassManager", "default_passes"]


def default_passes(device: torch.device) -> PassManager:
    """The passes every compiler's graphs go through."""
    return PassManager((DeviceRewrite(device), AliasAnalysis(), OutOfPlace()))
