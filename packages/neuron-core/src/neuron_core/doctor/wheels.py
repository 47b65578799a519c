# SPDX-License-Identifier: Apache-2.0
"""The Neuron wheels: real ones, or the placeholders of the same names on the public index.

Metadata proves nothing: some placeholders have no module, others one that raises, or one that is empty. A wheel is
real when its module imports and its version reaches the first real one's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.compatibility import numbers
from neuron_core.doctor.machine import Machine

__all__ = [
    "WHEELS",
    "Wheel",
    "WheelState",
    "check_wheels",
    "examine_wheel",
    "python_version",
    "torch_version",
]

_IMPORT_TIMEOUT_S = 120.0
_IMPORT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "m = importlib.import_module(sys.argv[2]); v = getattr(m, '__version__', None);"
    "print('\\n' + json.dumps(v if isinstance(v, str) else None))"
)


@dataclass(frozen=True)
class Wheel:
    """A distribution, the module it brings, the first version that is not a placeholder, and what needs it.

    ``needed_for`` is ``compiling``, ``running``, or empty for one that others stand in for.
    """

    distribution: str
    module: str
    floor: tuple[int, ...]
    needed_for: str = ""


WHEELS = (
    Wheel("libtorch-neuronx-lite", "libtorch_neuronx_lite", (2, 10)),
    Wheel("torch-neuronx", "torch_neuronx", (2, 0)),
    Wheel("neuronx-cc", "neuronxcc", (2, 0), "compiling"),
    Wheel("torch-xla", "torch_xla", (2, 0), "compiling"),
    Wheel("nki", "nki", (0, 1), "running"),
    Wheel("libneuronxla", "libneuronxla", (2, 0)),
)
"""What Neuron takes: compiling needs what it says; running needs everything, but one torch stack of the two."""

STACKS = ("libtorch-neuronx-lite", "torch-neuronx")


class WheelState(StrEnum):
    """What a wheel turned out to be."""

    REAL = "real"
    PLACEHOLDER = "placeholder"
    BROKEN = "broken"
    MISSING = "missing"


@dataclass(frozen=True)
class ExaminedWheel:
    """A wheel, its state, its version if it has one, and one line of reason."""

    wheel: Wheel
    state: WheelState
    version: str
    reason: str


def examine_wheel(wheel: Wheel) -> ExaminedWheel:
    """Look for a wheel, and import it in a short-lived process: a crash must not take this one."""
    listed = _metadata_version(wheel.distribution)
    if importlib.util.find_spec(wheel.module) is None:
        if listed is None:
            return ExaminedWheel(wheel, WheelState.MISSING, "", "not installed")
        reason = f"version {listed} has no module {wheel.module}"
        return ExaminedWheel(wheel, WheelState.PLACEHOLDER, listed, reason)
    version, problem = _import(wheel.module)
    version = version or listed or ""
    if numbers(version) < wheel.floor:
        wanted = ".".join(map(str, wheel.floor))
        reason = f"version {version or 'unknown'}; the real ones start at {wanted}"
        return ExaminedWheel(wheel, WheelState.PLACEHOLDER, version, f"{reason}{problem and f' ({problem})'}")
    if problem:
        return ExaminedWheel(wheel, WheelState.BROKEN, version, problem)
    return ExaminedWheel(wheel, WheelState.REAL, version, "")


def check_wheels(machine: Machine, examined: Iterable[ExaminedWheel]) -> list[Finding]:
    """One finding per wheel that is there, and one that names every wheel that is missing for what is wanted."""
    wheels = {each.wheel.distribution: each for each in examined}
    findings = [_present(each, machine) for each in wheels.values() if each.state is not WheelState.MISSING]
    real = {name for name, each in wheels.items() if each.state is WheelState.REAL}
    needs = ("compiling", "running") if machine.wants_neuron else ("compiling",)
    missing = [wheel.distribution for wheel in WHEELS if wheel.needed_for in needs]
    missing = [name for name in missing if name not in real]
    if machine.wants_neuron and not real & set(STACKS):
        missing.insert(0, " or ".join(STACKS))
    details = {"missing": missing}
    if missing and machine.wants_neuron_compiler:
        why = "running on Neuron" if machine.wants_neuron else "compiling for Neuron"
        advice = _how_to_install(torch_version(), machine.wants_neuron)
        found = f"missing for {why}: {', '.join(missing)}"
        findings.append(Finding("Neuron packages", Status.FAIL, found, advice, details))
    elif not findings:
        findings.append(
            Finding("Neuron packages", Status.OK, "none installed, none needed for the CPU device")
        )
    return findings


def python_version() -> str:
    """``major.minor.micro`` of this interpreter."""
    return ".".join(map(str, sys.version_info[:3]))


def torch_version() -> str:
    """Version of the installed torch, without importing it."""
    return importlib.metadata.version("torch")


def _present(each: ExaminedWheel, machine: Machine) -> Finding:
    name = each.wheel.distribution
    details = {"state": str(each.state), "version": each.version}
    if each.state is WheelState.REAL:
        return Finding(name, Status.OK, f"{each.version} (real)", details=details)
    if each.state is WheelState.BROKEN:
        status = Status.FAIL if machine.wants_neuron_compiler else Status.WARN
        advice = "install all Neuron packages from one SDK release; see the version check"
        return Finding(name, status, f"{each.version} cannot be imported: {each.reason}", advice, details)
    advice = f"pip uninstall {name}; the real one comes from the index of AWS's setup guide"
    return Finding(name, Status.WARN, f"a placeholder: {each.reason}", advice, details)


def _how_to_install(torch: str, to_run: bool) -> str:
    """What to install, pinned so that pip downloads one compiler instead of trying many."""
    from neuron_core.graphs.compilers.vendor_wheels import WHEELS as BY_TORCH
    from neuron_core.graphs.compilers.vendor_wheels import wheels_hint

    release = BY_TORCH.get(".".join(map(str, numbers(torch)[:2])))
    runs = f"; to run, also {' and '.join(release.running)}" if release is not None and to_run else ""
    return f"{wheels_hint(torch)}{runs}"


def _metadata_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import(module: str) -> tuple[str, str]:
    """The version a module says it has, and why it cannot be imported; both may be empty."""
    command = [sys.executable, "-c", _IMPORT, json.dumps(sys.path), module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"importing it takes more than {_IMPORT_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]) or "", ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        return "", f"importing it ends the process with signal {-done.returncode}"
    raised = [line for line in lines if line[:1].strip() and ":" in line and not line.startswith("Traceback")]
    return "", (raised or lines or [f"status {done.returncode}"])[-1]
