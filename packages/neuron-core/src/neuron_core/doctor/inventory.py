# SPDX-License-Identifier: Apache-2.0
"""The logical cores of this machine, as ``neuron-ls`` lists them, and the settings that must agree with them."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.machine import Machine
from neuron_core.errors import ConfigError, DeviceError

__all__ = ["CoreHolder", "ListedDevice", "check_cores", "check_logical_cores", "list_devices"]

_GIB = 1024**3
_TIMEOUT_S = 20.0
# Where AWS's package puts its tools, which is not on PATH everywhere.
_TOOLS = Path("/opt", "aws", "neuron", "bin")


@dataclass(frozen=True)
class CoreHolder:
    """A process that holds cores of a device."""

    pid: int
    command: str
    runtime_version: str


@dataclass(frozen=True)
class ListedDevice:
    """One chip: ``cores`` are its logical cores, ``lnc`` the physical cores that make one."""

    index: int
    cores: int
    lnc: int | None
    memory_bytes: int
    holders: tuple[CoreHolder, ...]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ListedDevice:
        """One element of ``neuron-ls -j`` (aws-neuron-sdk: tools/neuron-sys-tools/neuron-ls.rst)."""
        holders = tuple(
            CoreHolder(int(each["pid"]), str(each["command"]), str(each.get("neuron_runtime_version", "")))
            for each in data.get("neuron_processes") or ()
        )
        lnc = data.get("logical_neuroncore_config")
        return cls(
            index=int(data["neuron_device"]),
            cores=int(data["nc_count"]),
            lnc=None if lnc is None else int(lnc),
            memory_bytes=int(data["memory_size"]),
            holders=holders,
        )


def list_devices(search_path: str | None = None, timeout_s: float = _TIMEOUT_S) -> list[ListedDevice] | None:
    """What ``neuron-ls -j`` lists; None where the tool is not installed.

    Raises ``DeviceError`` when it fails, hangs, or prints something else than documented.
    """
    executable = shutil.which("neuron-ls", path=search_path) or shutil.which("neuron-ls", path=str(_TOOLS))
    if executable is None:
        return None
    command = [executable, "-j"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"neuron-ls did not answer within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        complaint = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise DeviceError(f"neuron-ls ended with status {done.returncode}: {complaint}")
    try:
        return [ListedDevice.from_json(item) for item in json.loads(done.stdout)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeviceError(
            f"neuron-ls -j printed something else than its documentation says: {error}"
        ) from error


def check_cores(machine: Machine, devices: list[ListedDevice] | None) -> list[Finding]:
    """The core inventory, who holds cores, and whether the visible ones exist."""
    if devices is None:
        if not machine.wants_neuron:
            return []
        return [Finding("cores", Status.WARN, "neuron-ls is not installed", "install aws-neuronx-tools")]
    total = sum(device.cores for device in devices)
    findings = [Finding("cores", Status.OK, _inventory(devices, total), details={"logical_cores": total})]
    holders = sorted({(holder.pid, holder.command) for device in devices for holder in device.holders})
    if holders:
        shown = "; ".join(f"pid {pid} ({command})" for pid, command in holders)
        advice = "a core belongs to one process; end it, or leave its cores out of NEURON_VISIBLE_DEVICES"
        findings.append(Finding("cores", Status.WARN, f"cores are held by {shown}", advice))
    beyond = [core for core in machine.environment.visible_devices or () if core >= total]
    if beyond:
        listed = ", ".join(map(str, beyond))
        found = f"NEURON_VISIBLE_DEVICES names core {listed}, and there are {total}"
        findings.append(Finding("cores", Status.FAIL, found, f"use cores 0 to {total - 1}"))
    return findings


def check_logical_cores(machine: Machine, devices: list[ListedDevice] | None) -> list[Finding]:
    """Whether everything that says how many physical cores make a logical one says the same."""
    said: dict[str, int] = {}
    if machine.environment.logical_nc_config is not None:
        said["NEURON_LOGICAL_NC_CONFIG"] = machine.environment.logical_nc_config
    virtual = machine.variables.get("NEURON_RT_VIRTUAL_CORE_SIZE", "").strip()
    if virtual:
        if not virtual.isdecimal():
            return [
                Finding(
                    "logical cores", Status.FAIL, f"NEURON_RT_VIRTUAL_CORE_SIZE={virtual!r}", "use 1 or 2"
                )
            ]
        said["NEURON_RT_VIRTUAL_CORE_SIZE"] = int(virtual)
    said |= {f"device {each.index}": each.lnc for each in devices or () if each.lnc is not None}
    if not said:
        return []
    if len(set(said.values())) > 1:
        shown = ", ".join(f"{where} says {lnc}" for where, lnc in said.items())
        advice = "an artifact runs only at the size it was compiled for; set NEURON_LOGICAL_NC_CONFIG and nothing else"
        return [Finding("logical cores", Status.FAIL, shown, advice, said)]
    size = next(iter(said.values()))
    try:
        if machine.target_chip is not None:
            machine.target_chip.logical_cores_at(size)
    except ConfigError as error:
        return [Finding("logical cores", Status.FAIL, f"size {size} ({', '.join(said)})", error.hint, said)]
    return [
        Finding("logical cores", Status.OK, f"{size} physical cores each ({', '.join(said)})", details=said)
    ]


def _inventory(devices: list[ListedDevice], total: int) -> str:
    memory = {f"{device.memory_bytes / _GIB:.0f} GiB" for device in devices}
    sizes = {f"LNC {device.lnc}" for device in devices if device.lnc is not None}
    each = ", ".join(sorted(sizes | memory))
    return f"{len(devices)} devices, {total} logical cores ({each} per device)"
