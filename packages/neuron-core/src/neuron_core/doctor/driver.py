# SPDX-License-Identifier: Apache-2.0
"""The Neuron driver and the runtime library, which come as packages of the operating system."""

from __future__ import annotations

import ctypes.util
import shutil
import subprocess

from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.machine import Machine

__all__ = ["check_driver", "driver_version", "runtime_version"]

DRIVER_PACKAGE = "aws-neuronx-dkms"
RUNTIME_PACKAGE = "aws-neuronx-runtime-lib"


def driver_version(machine: Machine) -> str | None:
    """Version of the loaded kernel module, or of the installed package if none is loaded."""
    try:
        return (machine.sys / "module/neuron/version").read_text().strip()
    except OSError:
        return _package_version(DRIVER_PACKAGE)


def runtime_version() -> str | None:
    """Version of the installed runtime library's package."""
    return _package_version(RUNTIME_PACKAGE)


def check_driver(machine: Machine) -> list[Finding]:
    """Driver and runtime, where Neuron is meant to run; elsewhere they are only mentioned when present."""
    driver, runtime = driver_version(machine), runtime_version()
    library = ctypes.util.find_library("nrt")
    findings = []
    bad = Status.FAIL if machine.wants_neuron else Status.INFO
    if driver is not None:
        loaded = (machine.sys / "module/neuron").is_dir()
        state = "loaded" if loaded else "installed, not loaded"
        status = Status.OK if loaded else bad
        findings.append(Finding("driver", status, f"{driver} ({state})", "" if loaded else "modprobe neuron"))
    elif machine.wants_neuron:
        findings.append(Finding("driver", bad, "no Neuron driver", f"install the package {DRIVER_PACKAGE}"))
    if runtime is not None or library is not None:
        findings.append(
            Finding("runtime", Status.OK, f"{runtime or 'version unknown'} ({library or 'libnrt'})")
        )
    elif machine.wants_neuron:
        advice = f"install the package {RUNTIME_PACKAGE}"
        findings.append(Finding("runtime", Status.WARN, "libnrt is not where the linker looks", advice))
    return findings


def _package_version(package: str) -> str | None:
    """Version of an installed Debian or RPM package, without the packaging's own suffix."""
    for command in (["dpkg-query", "-W", "-f", "${Version}"], ["rpm", "-q", "--qf", "%{VERSION}"]):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run([*command, package], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().partition("-")[0]
    return None
