# SPDX-License-Identifier: Apache-2.0
"""A process as others can recognise it later: machine, number and start time."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

__all__ = ["ProcessMark", "place"]

_START_TOLERANCE_S = 0.5
"""The kernel keeps start times in clock ticks, usually of 10 ms."""


@functools.cache
def place() -> str:
    """Where process numbers mean the same: host name, and a hash of boot and process-number namespace.

    Two containers may share a host name and not see each other's processes.
    """
    digest = hashlib.sha256()
    try:
        digest.update(Path("/proc/sys/kernel/random/boot_id").read_bytes())
        digest.update(os.readlink("/proc/self/ns/pid").encode())
    except OSError:
        digest.update(f"{psutil.boot_time():.0f}".encode())
    return f"{socket.gethostname()}-{digest.hexdigest()[:8]}"


@dataclass(frozen=True)
class ProcessMark:
    """Names one process: ``place`` as :func:`place` gives it, ``pid``, and ``start`` in seconds since boot.

    Not since 1970: that number moves when the clock of the machine is set.
    """

    place: str
    pid: int
    start: float

    @classmethod
    def current(cls) -> ProcessMark:
        """This process."""
        return cls(place(), os.getpid(), _start_of(os.getpid()))

    @classmethod
    def from_json(cls, data: Any) -> ProcessMark:
        """What ``to_json`` gave; raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
        return cls(str(data["place"]), int(data["pid"]), float(data["start"]))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    @property
    def host(self) -> str:
        """Host name."""
        return self.place.rpartition("-")[0]

    @property
    def is_local(self) -> bool:
        """Whether this process can tell if that one runs."""
        return self.place == place()

    @property
    def is_gone(self) -> bool:
        """Whether it surely ended: no such number here, or the number belongs to a later process.

        False for a process of another host.
        """
        if not self.is_local:
            return False
        try:
            if psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE:
                return True
            return abs(_start_of(self.pid) - self.start) > _START_TOLERANCE_S
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _start_of(pid: int) -> float:
    # In this order: psutil adds the time of boot it has read last.
    boot = psutil.boot_time()
    return round(psutil.Process(pid).create_time() - boot, 2)
