# SPDX-License-Identifier: Apache-2.0
"""Workers of ahead-of-time compilation that do as their bucket's name says."""

import os
import signal
import time

from neuron_core.errors import CompileError
from neuron_core.graphs.aot import Outcome


class Obedient:
    def __init__(self, journal):
        self.journal = journal

    def compile(self, task):
        with self.journal.open("a") as journal:
            journal.write(f"{task.bucket}\n")
        if task.bucket.startswith("fails"):
            raise CompileError(f"{task.bucket} has no kernel")
        if task.bucket.startswith("breaks"):
            raise ZeroDivisionError("a defect")
        if task.bucket.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return Outcome(1, 1, 0, (task.bucket,))


class Refuses:
    def __init__(self):
        raise CompileError("no such model")
