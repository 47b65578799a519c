# SPDX-License-Identifier: Apache-2.0
"""Showing how far a long load of weights is."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

__all__ = ["LoadProgress"]

QUIET_S = 2.0
"""A load that takes no longer shows nothing."""


class LoadProgress:
    """A progress bar over bytes that appears when a load has taken ``QUIET_S`` seconds."""

    def __init__(self, *, shown: bool, quiet_s: float = QUIET_S) -> None:
        self._shown = shown
        self._quiet_s = quiet_s
        self._begun = time.perf_counter()
        self._bar: Any = None

    def __enter__(self) -> Self:
        """Start the clock."""
        self._begun = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes are read."""
        if self._bar is None and self._shown and time.perf_counter() - self._begun >= self._quiet_s:
            self._bar = tqdm(
                total=total,
                desc="Weights",
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                dynamic_ncols=True,
            )
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
