# SPDX-License-Identifier: Apache-2.0
"""The compilers: g++, which the CPU device cannot do without, and AWS's ``neuronx-cc``."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.machine import Machine

__all__ = ["check_cpp_compiler", "check_neuron_compiler"]

_PROGRAM = """\
#include <Python.h>
#include <concepts>
#include <omp.h>
int main() { return omp_get_max_threads() < 1; }
"""


def check_neuron_compiler(machine: Machine, executable: str = "neuronx-cc") -> list[Finding]:
    """Whether ``neuronx-cc`` answers as the real one does, where graphs are compiled for Neuron."""
    if not machine.wants_neuron_compiler and shutil.which(executable) is None:
        return []
    from neuron_core.graphs.compilers.vendor_tool import VendorTool

    tool = VendorTool.find(executable)
    if not tool.missing:
        return [Finding("neuronx-cc program", Status.OK, f"{tool.version} ({tool.path})")]
    status = Status.FAIL if machine.wants_neuron_compiler else Status.WARN
    advice = "the wheel neuronx-cc brings it; activate the environment it is installed in"
    return [Finding("neuronx-cc program", status, tool.missing, advice)]


def check_cpp_compiler(needed: bool, compiler: str = "g++") -> Finding:
    """Whether the CPU device can build its kernels: a small program with OpenMP and Python's headers is built.

    ``needed``: the CPU device is the chosen one, so that without a compiler nothing can start.
    """
    bad = Status.FAIL if needed else Status.INFO
    where = shutil.which(compiler)
    if where is None:
        advice = "install it (Debian and Ubuntu: apt install g++)"
        return Finding("C++ compiler", bad, f"{compiler} is not on PATH", advice)
    version = subprocess.run([where, "--version"], capture_output=True, text=True, check=False).stdout
    first_line = (version.splitlines() or [compiler])[0]
    with tempfile.TemporaryDirectory(prefix="neuron-doctor-") as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROGRAM)
        headers = sysconfig.get_paths()["include"]
        command = [where, "-std=c++20", "-fopenmp", f"-I{headers}", "-c", str(source), "-o", f"{source}.o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Finding("C++ compiler", Status.OK, first_line, details={"path": where})
    complaint = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
    advice = (
        "it must build C++20 with OpenMP against Python's headers (Debian and Ubuntu: g++ and python3-dev)"
    )
    return Finding("C++ compiler", bad, f"{first_line} does not build a small program: {complaint}", advice)
