# SPDX-License-Identifier: Apache-2.0
"""Which device is chosen here, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.machine import Machine
from neuron_core.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from neuron_core.devices.neuron import Probe

__all__ = ["check_device", "check_instance"]


def check_device(machine: Machine, probe: Callable[[], Probe] | None = None) -> list[Finding]:
    """Choose a device as a server would; the CPU on a host with a Neuron device that does not start is a failure.

    ``probe`` starts the runtime, by default in a short-lived process.
    """
    from neuron_core.devices.discovery import discover
    from neuron_core.devices.neuron import probe_in_child

    details: dict[str, Any] = {"device_nodes": machine.num_device_nodes}
    try:
        found = discover(machine.environment, dev_root=machine.dev, probe=probe or probe_in_child)
    except (DeviceError, ConfigError) as error:
        return [Finding("device", Status.FAIL, str(error), "the checks below say what is missing", details)]
    details |= {"device": found.device.name}
    if found.device.name == "cpu" and machine.wants_neuron:
        advice = "repair what the reason names, or set VLLM_NEURON_DEVICE=cpu to use the CPU on purpose"
        nodes = f"{machine.num_device_nodes} Neuron device nodes, but the {found.reason}"
        return [Finding("device", Status.FAIL, nodes, advice, details)]
    remarks = [Finding("device", Status.WARN, remark, "unset it") for remark in found.remarks]
    return [Finding("device", Status.OK, found.reason, details=details), *remarks]


def check_instance(machine: Machine) -> list[Finding]:
    """The instance type; one with Neuron chips but no device node lacks the driver."""
    if machine.instance_type is None or machine.chip is None:
        return []
    found = f"{machine.instance_type}: {machine.chip.name}, {machine.num_device_nodes} device nodes"
    if machine.num_device_nodes or machine.environment.device == "cpu":
        return [Finding("instance", Status.OK, found)]
    advice = "install and load the driver (package aws-neuronx-dkms); lsmod must list neuron"
    return [Finding("instance", Status.FAIL, found, advice)]
