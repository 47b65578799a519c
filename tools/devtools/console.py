# SPDX-License-Identifier: Apache-2.0
"""Steps with progress: a step longer than two seconds says what it is doing."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

QUIET_S = 2.0
"""A step shorter than this prints nothing."""

LINE_EVERY_S = 10.0
"""How often a step reports where the output is not a terminal."""

TAIL_LINES = 40
"""How much of a failed command's output is shown."""


class Failure(Exception):
    """A step did not succeed; the message says what to do."""


class Step:
    """One named step of the set-up, as a context manager that shows its progress while it lasts."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.detail = ""
        self._start = time.monotonic()
        self._next_report = self._start + QUIET_S
        self._shown = False

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._start

    def update(self, detail: str) -> None:
        """Say how far the step is; call it as often as convenient."""
        self.detail = detail
        if time.monotonic() < self._next_report:
            return
        self._shown = True
        line = f"{self.title} … {self.elapsed_s:.0f} s  {self.detail}"
        if sys.stdout.isatty():
            width = os.get_terminal_size(sys.stdout.fileno()).columns - 1
            sys.stdout.write(f"\r\x1b[K{line[:width]}")
            sys.stdout.flush()
            self._next_report = time.monotonic() + 0.2
        else:
            print(line[:160], flush=True)
            self._next_report = time.monotonic() + LINE_EVERY_S

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        progress: Callable[[str], str] = str.strip,
    ) -> str:
        """Run `command` and return its output; raises `Failure` with the end of it when it fails.

        `progress` turns the last line of the output into what the step shows.
        """
        process = subprocess.Popen(
            [str(word) for word in command],
            env=dict(env) if env is not None else None,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        lines: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                self.update(progress(lines[-1]) if lines else "")
                time.sleep(0.05)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        reader.join()
        if process.returncode != 0:
            words = " ".join(str(word) for word in command)
            raise Failure(f"{self.title} failed: {words} (exit code {process.returncode})\n{tail(lines)}")
        return "".join(lines)

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if sys.stdout.isatty() and self._shown:
            sys.stdout.write("\r\x1b[K")
        if self._shown or self.elapsed_s > QUIET_S:
            print(f"{self.title}: {'failed' if kind else 'done'} in {self.elapsed_s:.1f} s", flush=True)


def tail(lines: Sequence[str]) -> str:
    """The last lines of a command's output, indented."""
    return "".join(f"    {line.rstrip()}\n" for line in collections.deque(lines, TAIL_LINES))


def megabytes(size_bytes: float) -> str:
    """A size in whole megabytes, for people."""
    return f"{size_bytes / 1e6:,.0f} MB"
