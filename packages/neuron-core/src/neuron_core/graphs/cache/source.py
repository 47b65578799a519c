# SPDX-License-Identifier: Apache-2.0
"""What the local cache needs of a remote store; it imports none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

__all__ = ["RefusalCount", "RemoteSource"]


class RefusalCount(Protocol):
    """How many remote documents were there and not to be used."""

    @property
    def refused(self) -> int:
        """Since the store was opened."""
        ...


class RemoteSource(Protocol):
    """What the cache needs of a remote store; ``neuron_core.graphs.remote.RemoteStore`` is one."""

    @property
    def counters(self) -> RefusalCount:
        """What the store refused."""
        ...

    def fetch(self, digest: str, staging: Path) -> bool:
        """Put manifest and files of an approved entry into an empty folder; False when there is none."""
        ...

    def fetch_request(self, digest: str) -> dict[str, Any] | None:
        """An approved request record, or None."""
        ...
