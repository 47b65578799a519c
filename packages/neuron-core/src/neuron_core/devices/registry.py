# SPDX-License-Identifier: Apache-2.0
"""The devices there are by name: the two built in, and those that other distributions add."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint

from neuron_core.errors import DeviceError

__all__ = ["BUILT_IN", "GROUP", "added_device", "device_names"]

GROUP = "neuron_core.devices"
"""Entry point group: a device's name to a callable that takes an ``Environment`` and returns a ``Device``."""

BUILT_IN = ("cpu", "neuron")


def device_names() -> tuple[str, ...]:
    """Every name that ``VLLM_NEURON_DEVICE`` takes."""
    return (*BUILT_IN, *_added())


def added_device(name: str) -> EntryPoint:
    """The entry point of a device that is not built in.

    Raises ``DeviceError`` if there is none, or if two distributions claim the name.
    """
    found = _added().get(name, [])
    if len(found) != 1:
        owners = ", ".join(point.dist.name if point.dist else "?" for point in found) or "none"
        raise DeviceError(f"device {name!r}: one distribution has to provide it, found: {owners}")
    return found[0]


def _added() -> dict[str, list[EntryPoint]]:
    added: dict[str, list[EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name in BUILT_IN:
            raise DeviceError(f"device {point.name!r} is built in; {point.value} cannot replace it")
        added.setdefault(point.name, []).append(point)
    return added
