# SPDX-License-Identifier: Apache-2.0
"""Where the seconds between a worker process's start and its readiness went."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

import psutil

__all__ = ["PHASES", "StartupTimes"]

PHASES = ("import", "load", "capture", "compile", "artifact load", "warm-up")
"""In order; ``import`` is everything before the worker exists, ``capture`` includes asking the cache."""


class StartupTimes:
    """Seconds of each phase. Phases do not overlap; what belongs to none is ``other``."""

    def __init__(self) -> None:
        self._started = psutil.Process().create_time()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.spend("import", time.time() - self._started)

    def spend(self, phase: str, seconds: float) -> None:
        """Add to a phase; raises ``KeyError`` for one that is not in ``PHASES``."""
        self._seconds[phase] += seconds

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a block."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.spend(name, time.perf_counter() - begun)

    def total(self) -> float:
        """Seconds since the process started."""
        return time.time() - self._started

    def phases(self) -> Mapping[str, float]:
        """Seconds of each phase, and of ``other``; they add up to ``total``."""
        return {**self._seconds, "other": max(0.0, self.total() - sum(self._seconds.values()))}

    def summary(self) -> str:
        """``start-up took 9.8 s: import 6.1, load 0.4, …``."""
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases().items())
        return f"start-up took {self.total():.1f} s: {phases}"
