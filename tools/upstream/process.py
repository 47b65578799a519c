# SPDX-License-Identifier: Apache-2.0
"""One folder of vLLM's tests in processes of its own, started again after a crash until each test has a result."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from devtools.console import Failure

from . import record
from .record import Result

MARK = "VLLM_TESTS_UPSTREAM_RUN"
"""Set in the environment of a run, so that servers it left behind are found and ended."""

GRACE_S = 120
"""How much longer than the timeout of a test the process may say nothing."""

ENDED_WITH_TESTS = (0, 1, 5)
"""pytest's exit codes: all passed, some failed, none selected."""


@dataclass(frozen=True)
class Run:
    """How pytest is started in vLLM's checkout."""

    source: Path
    """The checkout."""
    environ: Mapping[str, str]
    scratch: Path
    """Where records and logs go, which are named after the folder."""

    def folder(
        self, name: str, selection: Sequence[str], *, timeout_s: int, ignore: Sequence[str] = ()
    ) -> dict[str, Result]:
        """Run what is selected (paths or node ids); returns the results by node id.

        Raises `Failure` where pytest itself does not get to run tests.
        """
        path, log = self.scratch / f"{name}.jsonl", self.scratch / f"{name}.log"
        done = self.scratch / f"{name}.done"
        path.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "upstream.plugin"]
        command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb=short", "-q"]
        command += [f"--timeout={timeout_s}", f"--record={path}", f"--leave-out={done}"]
        command += [f"--ignore={each}" for each in ignore]
        while True:
            before = record.read(path)
            done.write_text("".join(f"{each}\n" for each in before))
            code = self._pytest([*command, *selection], path, log, timeout_s + GRACE_S)
            results = record.read(path)
            died_in = [each for each, result in results.items() if result.outcome == "started"]
            for each in died_in:
                record.add(path, each, Result("failed", f"the process ended in this test ({code})"))
            if code in ENDED_WITH_TESTS and not died_in:
                return results
            if len(results) == len(before):
                raise Failure(f"{name}: pytest ran no test (exit code {code}); it said so in {log}")

    def _pytest(self, command: Sequence[str], path: Path, log: Path, silence_s: float) -> int:
        """Run once, until it ends or has added nothing to its record for ``silence_s``; returns the exit code."""
        mark = uuid.uuid4().hex
        env = {**self.environ, MARK: mark}
        with log.open("a") as output:
            process = subprocess.Popen(
                command, cwd=self.source, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
            heard = time.monotonic()
            size = -1
            try:
                while process.poll() is None and time.monotonic() - heard < silence_s:
                    time.sleep(0.5)
                    if (now := path.stat().st_size if path.exists() else 0) != size:
                        size, heard = now, time.monotonic()
            finally:
                _end(mark)
        return process.wait()


def _end(mark: str) -> None:
    """End every process of a run that is still there: pytest if it hangs, servers whose test did not stop them."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
