# SPDX-License-Identifier: Apache-2.0
"""Making a worker's series visible at the API server's ``/metrics``, which another process serves."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile

from neuron_core.environ import export

__all__ = ["share_metrics"]

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def share_metrics() -> None:
    """Let all processes of this server write their series to one directory, removed when this process ends.

    prometheus_client decides how values are kept when it is first imported, so this has to come before that; a
    directory the user has set is used as it is. Children inherit it.
    """
    if VARIABLE in os.environ or "prometheus_client" in sys.modules:
        return
    directory = tempfile.mkdtemp(prefix="vllm-neuron-metrics-")
    export({VARIABLE: directory})
    atexit.register(_remove, directory, os.getpid())


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child runs the same exit handlers
        shutil.rmtree(directory, ignore_errors=True)
