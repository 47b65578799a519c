# SPDX-License-Identifier: Apache-2.0
"""Which device to use, and one line saying why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from neuron_core.devices.base import Device
from neuron_core.devices.cpu import CpuDevice
from neuron_core.devices.neuron import NeuronDevice, Probe, probe_in_child
from neuron_core.devices.registry import BUILT_IN, added_device, device_names
from neuron_core.environ import Environment
from neuron_core.errors import DeviceError, unknown_name_hint

__all__ = ["Discovery", "discover", "open_device"]


@dataclass(frozen=True)
class Discovery:
    """The chosen device, one line saying why, and remarks on settings that have no effect on it."""

    device: Device
    reason: str
    remarks: tuple[str, ...] = ()


def discover(
    environment: Environment, *, dev_root: Path = Path("/dev"), probe: Callable[[], Probe] = probe_in_child
) -> Discovery:
    """Choose a device: Neuron only if its runtime really starts, otherwise the CPU.

    ``VLLM_NEURON_DEVICE`` forces one; forcing Neuron raises ``DeviceError`` naming what is missing. Choosing
    claims no core: the probe runs in a short-lived process. Workers do not choose again, they use
    ``open_device``. A device that another distribution adds is never chosen, only forced.
    """
    if environment.device is not None and environment.device not in BUILT_IN:
        device = open_device(environment.device, environment)
        return Discovery(device, f"{device.name} device: VLLM_NEURON_DEVICE={environment.device}")
    if environment.device == "cpu":
        return _cpu(environment, "VLLM_NEURON_DEVICE=cpu")
    found = _probe(dev_root, probe)
    if found.num_cores > 0:
        reason = f"Neuron device: {found.num_cores} logical cores, {found.stack}"
        return Discovery(NeuronDevice(environment, found.stack), reason)
    if environment.device == "neuron":
        raise DeviceError(
            f"VLLM_NEURON_DEVICE='neuron': {found.reason}; unset it, or use cpu, to run on the CPU"
        )
    return _cpu(environment, found.reason)


def open_device(name: str, environment: Environment) -> Device:
    """The device a parent process has chosen, by name, without probing.

    Raises ``DeviceError`` for a name nobody provides, and for one whose provider makes a device of another name.
    """
    if name == "cpu":
        return CpuDevice(cache_dir=environment.cache_dir)
    if name == "neuron":
        return NeuronDevice(environment)
    if name not in (known := device_names()):
        raise DeviceError(f"no device is called {name!r}: {unknown_name_hint(name, known)}")
    point = added_device(name)
    device: Device = point.load()(environment)
    if device.name != name:
        raise DeviceError(f"device {name!r}: {point.value} made a device that calls itself {device.name!r}")
    return device


def _probe(dev_root: Path, probe: Callable[[], Probe]) -> Probe:
    if not any(dev_root.glob("neuron[0-9]*")):
        return Probe(0, "", f"no Neuron device node ({dev_root}/neuron*)")
    return probe()


def _cpu(environment: Environment, reason: str) -> Discovery:
    neuron_only = {
        "NEURON_PLATFORM_TARGET_OVERRIDE": environment.platform_target,
        "NEURON_VISIBLE_DEVICES": environment.visible_devices,
    }
    remarks = [
        f"{name} is set and has no effect on the CPU device" for name, value in neuron_only.items() if value
    ]
    return Discovery(CpuDevice(cache_dir=environment.cache_dir), f"CPU device: {reason}", tuple(remarks))
