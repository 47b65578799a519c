# SPDX-License-Identifier: Apache-2.0
"""Whether this host has the memory for its compiles."""

from __future__ import annotations

from neuron_core.devices.host import Host
from neuron_core.doctor.check import Finding, Status

__all__ = ["CPU_COMPILE_BYTES", "NEURON_COMPILE_BYTES", "check_compile_memory"]

_GIB = 1024**3

CPU_COMPILE_BYTES = 1 * _GIB
"""Host memory one compile for the CPU device is planned with; g++ takes about half of it for a decoder layer."""

NEURON_COMPILE_BYTES = 8 * _GIB
"""Host memory one ``neuronx-cc`` is planned with.

AWS publishes no figure. Users report that the default of eight at once is killed on 32 GiB
(neuronx-distributed-inference#26, neuronx-distributed#53, nki-samples#87), so it takes more than 4 GiB.
"""


def check_compile_memory(jobs: int | None, for_neuron: bool, host: Host | None = None) -> Finding:
    """How many compiles fit this host's memory at once; ``jobs`` are asked for, one per CPU when None.

    A host that runs out of memory kills a compiler with signal 9, which then looks like a fault of the graph.
    """
    host = host or Host()
    cpus, available = len(host.cpus()), host.available_memory_bytes()
    each = NEURON_COMPILE_BYTES if for_neuron else CPU_COMPILE_BYTES
    wanted, fitting = jobs or cpus, available // each
    found = (
        f"{cpus} CPUs, {available / _GIB:.1f} GiB free of {host.total_memory_bytes() / _GIB:.1f} GiB; "
        f"{fitting} compiles fit at once ({each / _GIB:.0f} GiB each), {wanted} would run"
    )
    details = {"cpus": cpus, "available_bytes": available, "fitting": fitting, "jobs": wanted}
    if fitting >= wanted:
        return Finding("host memory", Status.OK, found, details=details)
    elsewhere = "compile on a larger host and share the result (neuron cache push)"
    advice = f"set VLLM_NEURON_COMPILE_JOBS={fitting}, or {elsewhere}" if fitting else elsewhere
    return Finding("host memory", Status.WARN, found, advice, details)
