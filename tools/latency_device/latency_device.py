# SPDX-License-Identifier: Apache-2.0
"""A device whose executions each take the same time in a thread of their own, as an accelerator's do.

It computes on the CPU, then sleeps until the time is over, so that the host's processors are free meanwhile and what
the host does between two executions can be seen. With this folder on ``PYTHONPATH``, ``VLLM_NEURON_DEVICE=latency``
uses it: the folder is an installed distribution as far as Python can tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from neuron_core.devices.cpu import CpuDevice
from neuron_core.devices.stream import Execution, Stream, ThreadStream
from neuron_core.environ import Environment

T = TypeVar("T")

LATENCY_S = 0.02


class LatencyStream(ThreadStream):
    """One thread; an execution ends ``LATENCY_S`` after it began, or when its work is done if that is later."""

    def submit(self, work: Callable[[], T]) -> Execution[T]:
        """Add ``work``."""

        def slowly() -> T:
            end = time.perf_counter() + LATENCY_S
            result = work()
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        return super().submit(slowly)


class LatencyDevice(CpuDevice):
    """The CPU device with executions of a fixed length."""

    name = "latency"
    overlaps_host = True

    def stream(self, *, overlap: bool) -> Stream:
        """Always beside the caller; without ``overlap`` the runner waits for each execution."""
        return LatencyStream()


def make(environment: Environment) -> LatencyDevice:
    """The entry point."""
    return LatencyDevice(cache_dir=environment.cache_dir)
