# SPDX-License-Identifier: Apache-2.0
"""Showing how far a long load of weights is."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

__all__ = ["LoadProgress"]

QUIET_S = 2.0
"""A load that takes no longer shows nothing."""


class LoadProgress:
    """A progress bar over bytes that appears when a load has taken ``quiet_s`` seconds."""

    def __init__(self, *, shown: bool, quiet_s: float = QUIET_S) -> None:
        self._bar: Any = tqdm(
            desc="Weights",
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            dynamic_ncols=True,
            delay=quiet_s,
            disable=not shown,
        )

    def __enter__(self) -> Self:
        """Nothing: the clock runs since the bar was made."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar."""
        self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes are read."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)
