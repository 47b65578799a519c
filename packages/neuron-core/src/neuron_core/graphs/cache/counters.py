# SPDX-License-Identifier: Apache-2.0
"""What a process asked of its compile cache, in numbers."""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["CacheCounters"]


@dataclass
class CacheCounters:
    """Counts of this process; several threads may add.

    ``hits`` are graphs that needed no compile, ``misses`` compiles, ``invalid`` entries that failed their check and
    were removed. ``remote_refused`` entries were fetched and failed their check. ``bytes_read`` were hashed on the
    way to a hit, ``bytes_written`` came from compiles. ``seconds_saved`` is what the hits took to compile.
    """

    hits: int = 0
    misses: int = 0
    invalid: int = 0
    remote_hits: int = 0
    remote_misses: int = 0
    remote_refused: int = 0
    failures_recorded: int = 0
    evicted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_downloaded: int = 0
    seconds_saved: float = 0.0

    def __post_init__(self) -> None:
        """Compile threads count too."""
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> None:
        """Add to the counter ``name``; raises ``AttributeError`` for one that does not exist."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)
