# SPDX-License-Identifier: Apache-2.0
"""All checks, in the order a person would make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_core import __version__
from neuron_core.doctor.cache_folder import check_cache_folder, check_file_system
from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.compatibility import COMPONENTS
from neuron_core.doctor.compilers import check_cpp_compiler, check_neuron_compiler
from neuron_core.doctor.device import check_device, check_instance
from neuron_core.doctor.driver import check_driver, driver_version, runtime_version
from neuron_core.doctor.entries import check_entries, check_failures
from neuron_core.doctor.inventory import check_cores, check_logical_cores, list_devices
from neuron_core.doctor.machine import Machine
from neuron_core.doctor.memory import check_compile_memory
from neuron_core.doctor.pinning import check_pinning
from neuron_core.doctor.remote import check_remote
from neuron_core.doctor.settings import check_settings, read_settings
from neuron_core.doctor.versions import check_versions
from neuron_core.doctor.wheels import (
    WHEELS,
    WheelState,
    check_wheels,
    examine_wheel,
    python_version,
    torch_version,
)
from neuron_core.errors import DeviceError

if TYPE_CHECKING:
    from neuron_core.devices.neuron import Probe

__all__ = ["Report", "examine"]


@dataclass(frozen=True)
class Report:
    """Every finding, in order."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether no check failed; warnings are allowed."""
        return all(finding.status is not Status.FAIL for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        checks = [finding.to_json() for finding in self.findings]
        return {"version": __version__, "healthy": self.healthy, "checks": checks}


def examine(
    variables: Mapping[str, str],
    *,
    dev: Path = Path("/dev"),
    sys: Path = Path("/sys"),
    probe: Callable[[], Probe] | None = None,
    on_check: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run every check with these environment variables; ``on_check`` is told what is looked at next.

    ``dev`` and ``sys`` are where the kernel's files are mounted; ``probe`` starts the Neuron runtime, by default in
    a short-lived process. Nothing is changed: the cache directory is not even made.
    """
    environment, errors = read_settings(variables)
    machine = Machine(environment, variables, dev, sys)
    findings = check_settings(variables, errors)
    on_check("device")
    device = check_device(machine, probe)
    findings += [*device, *check_instance(machine), *check_driver(machine), *_inventory(machine)]
    on_check("Neuron packages")
    findings += _packages(machine)
    on_check("host")
    uses_cpu = any(each.details.get("device") == "cpu" for each in device)
    findings += [
        *check_neuron_compiler(machine),
        check_cpp_compiler(needed=uses_cpu),
        check_compile_memory(environment.compile_jobs, machine.wants_neuron_compiler),
    ]
    on_check("compile cache")
    findings += [*check_cache_folder(environment), *check_file_system(environment)]
    findings += [*check_entries(machine), *check_failures(machine)]
    on_check("remote cache")
    findings += check_remote(environment)
    return Report(tuple(findings))


def _inventory(machine: Machine) -> Iterator[Finding]:
    devices = None
    try:
        devices = list_devices(machine.variables.get("PATH"))
    except DeviceError as error:
        status = Status.FAIL if machine.wants_neuron else Status.WARN
        yield Finding("cores", status, str(error), "check that the driver is loaded and the tools match it")
    else:
        yield from check_cores(machine, devices)
    yield from check_logical_cores(machine, devices)


def _packages(machine: Machine) -> Iterator[Finding]:
    examined = [examine_wheel(wheel) for wheel in WHEELS]
    yield from check_wheels(machine, examined)
    installed = {
        each.wheel.distribution: each.version
        for each in examined
        if each.state in (WheelState.REAL, WheelState.BROKEN)
    }
    versions = {name: version for name, version in installed.items() if name in COMPONENTS}
    for name, version in (("runtime", runtime_version()), ("driver", driver_version(machine))):
        if version is not None:
            versions[name] = version
    yield from check_versions(versions, torch_version(), python_version(), machine.wants_neuron_compiler)
    yield from check_pinning(machine.variables, installed)
