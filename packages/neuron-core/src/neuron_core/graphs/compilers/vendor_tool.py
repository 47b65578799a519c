# SPDX-License-Identifier: Apache-2.0
"""The vendor compiler's executable: is it there and real, which version, and one bounded run of it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["VendorTool"]

_VERSION = re.compile(r"NeuronX Compiler version (\d+)(\.\S+)")
_VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class VendorTool:
    """``neuronx-cc`` on this machine; ``version`` is "" and ``missing`` says why when it cannot be used."""

    path: str
    version: str
    missing: str = ""

    @classmethod
    def find(cls, executable: str) -> VendorTool:
        """Look ``executable`` up, a name on PATH or a path, and ask it for its version.

        A program that does not answer as the real compiler does (PyPI holds a placeholder) counts as missing.
        """
        path = shutil.which(executable)
        if path is None:
            return cls("", "", f"{executable} is not installed")
        return _ask(path)

    def run(self, arguments: Sequence[str], work: Path, log: Path, timeout_s: float) -> int | None:
        """Exit status of a run in folder ``work``, its output in ``log``; None when its time was up.

        Whatever happens here, the compiler and the programs it started end with the call.
        """
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self.path, *arguments],
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


@functools.cache
def _ask(path: str) -> VendorTool:
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return VendorTool(path, "", f"{path} does not run ({error})")
    said = f"{done.stdout}\n{done.stderr}"
    match = _VERSION.search(said)
    if done.returncode != 0 or match is None or int(match[1]) < 2:
        first = (said.strip().splitlines() or ["nothing"])[0]
        reason = f"{path} is not the real compiler (--version: exit status {done.returncode}, {first!r})"
        return VendorTool(path, "", reason)
    return VendorTool(path, match[1] + match[2])
