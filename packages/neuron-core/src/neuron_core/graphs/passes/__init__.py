# SPDX-License-Identifier: Apache-2.0
"""Graph passes, in the order they run.

Device rewrite, duplicate inputs, alias analysis, in-place to out-of-place, dead code, replica groups.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from neuron_core.graphs.passes.alias import AliasAnalysis
from neuron_core.graphs.passes.dead_code import DeadCode
from neuron_core.graphs.passes.device_rewrite import DeviceRewrite
from neuron_core.graphs.passes.duplicates import DuplicateInputs
from neuron_core.graphs.passes.manager import PassManager
from neuron_core.graphs.passes.memory import repeated_inputs, shared_inputs
from neuron_core.graphs.passes.out_of_place import OutOfPlace
from neuron_core.graphs.passes.replica_groups import ReplicaGroups

__all__ = [
    "AliasAnalysis",
    "DeadCode",
    "DeviceRewrite",
    "DuplicateInputs",
    "OutOfPlace",
    "PassManager",
    "ReplicaGroups",
    "default_passes",
    "repeated_inputs",
    "shared_inputs",
]


def default_passes(device: torch.device, disabled: Collection[str] = ()) -> PassManager:
    """The passes every compiler's graphs go through; ``disabled`` names those to leave out."""
    passes = (
        DeviceRewrite(device),
        DuplicateInputs(),
        AliasAnalysis(),
        OutOfPlace(),
        DeadCode(),
        ReplicaGroups(),
    )
    return PassManager(passes, disabled)
