# SPDX-License-Identifier: Apache-2.0
"""Making a worker's series visible at the API server's ``/metrics``, which another process serves."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

from neuron_core.environ import export

__all__ = ["share_metrics"]

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
PREFIX = "vllm-neuron-metrics-"


def share_metrics() -> None:
    """Let all processes of this server write their series to one directory, removed when this process ends.

    prometheus_client decides how values are kept when it is first imported, so this has to come before that; a
    directory the user has set is used as it is. Processes of one server inherit it; a program that another one
    started, such as a second server, gets a directory of its own, or the two would add up their counters.
    """
    if "prometheus_client" in sys.modules or _is_for_us(os.environ.get(VARIABLE)):
        return
    directory = tempfile.mkdtemp(prefix=PREFIX)
    export({VARIABLE: directory})
    atexit.register(_remove, directory, os.getpid())


def _is_for_us(directory: str | None) -> bool:
    """Whether the variable's value is the user's, or was made here by the server this process belongs to."""
    if directory is None:
        return False
    return not Path(directory).name.startswith(PREFIX) or _is_child()


def _is_child() -> bool:
    """Whether this process was made by ``multiprocessing``, forked or spawned.

    A spawned one imports this before ``multiprocessing`` knows a parent; then the words it was started with tell.
    """
    spawned = any("multiprocessing" in word for word in sys.orig_argv)
    return spawned or multiprocessing.parent_process() is not None


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child runs the same exit handlers
        shutil.rmtree(directory, ignore_errors=True)
