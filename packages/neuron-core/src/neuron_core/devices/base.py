# SPDX-License-Identifier: Apache-2.0
"""The one interface through which everything above talks to hardware."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from neuron_core.devices.chips import ChipSpec
from neuron_core.devices.stream import Stream

__all__ = ["Device"]


class Device(Protocol):
    """A place that holds tensors and runs graphs. Nothing above it asks which one it is."""

    name: str
    """``cpu`` or ``neuron``."""
    chip: ChipSpec | None
    """The chip, or None for the CPU device."""
    ranks_share_memory: bool
    """Whether the ranks of one host draw on the same memory, so that each may plan with its share only."""
    overlaps_host: bool
    """Whether executions leave the host's processors free, so that preparing the next one meanwhile pays."""

    @property
    def torch_device(self) -> torch.device:
        """Where weights, KV tensors and step inputs are allocated."""
        ...

    def start(self, rank: int, world_size: int) -> None:
        """Claim this rank's part of the device; called once in the worker, before anything is allocated.

        ``rank`` and ``world_size`` count the ranks on this host. Raises ``DeviceError`` if it cannot start.
        """
        ...

    def total_memory_bytes(self) -> int:
        """Memory the device has, or that this process may use at most."""
        ...

    def available_memory_bytes(self) -> int:
        """Memory that could be allocated now."""
        ...

    def prepare(self, module: nn.Module) -> None:
        """Put loaded weights, in place, into the form the device computes with fastest."""
        ...

    def pin_threads(self, rank: int, world_size: int) -> None:
        """Bind this process's compute threads to the processors that belong to ``rank`` of ``world_size``."""
        ...

    def stream(self, *, overlap: bool) -> Stream:
        """A queue for this device's executions; with ``overlap`` they run beside the thread that submits them.

        What depends on the thread, such as ``start``, has to be submitted too.
        """
        ...

    def synchronize(self) -> None:
        """Wait until everything submitted to the device has run."""
        ...

    def identity(self) -> str:
        """What compiled code depends on, for cache keys: devices of equal identity exchange artifacts."""
        ...
