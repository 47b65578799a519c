# SPDX-License-Identifier: Apache-2.0
"""Letting a process that has computed on several threads fork its engine.

vLLM forks ``EngineCore``. libgomp, whose threads torch computes with, does not survive that: the child believes
that it still has its parent's pool of threads and waits for them for ever, at its first parallel operation.
vLLM's own CPU platform starts engines by ``spawn`` for this, which imports everything again and needs a main
module that is safe to import. OpenMP 5.0 has a call that gives the pool back, after which a fork is safe.
"""

from __future__ import annotations

import ctypes
import functools
import os

__all__ = ["give_threads_back_before_fork"]

OMP_PAUSE_HARD = 2
"""From the standard: free everything; the next parallel region starts anew."""


@functools.cache
def give_threads_back_before_fork() -> None:
    """Before every fork of this process, let OpenMP end the threads that this thread computes with."""
    os.register_at_fork(before=_pause)


def _pause() -> None:
    for path in _loaded_runtimes():
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:
            pause(OMP_PAUSE_HARD)


def _loaded_runtimes() -> set[str]:
    """The files of libgomp that this process has loaded; none before torch is imported."""
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "libgomp" in line}
    return {path for path in paths if os.path.exists(path)}
