# SPDX-License-Identifier: Apache-2.0
"""What the operating system lets this process use: memory and processors, control groups included."""

from __future__ import annotations

import itertools
import math
import os
import platform
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Host"]

ALLOWED_CPUS = frozenset(os.sched_getaffinity(0))
"""Processors this process was started on. Read once: a device binds the main thread to one of them, and the mask of
that thread is all that the system would tell a second engine in the same process."""


@dataclass(frozen=True)
class _Hierarchy:
    """Where one control-group controller is mounted, the group of this process in it, and its file names."""

    mount: Path
    group: str
    limit: str
    usage: str
    inactive: str

    def levels(self) -> Iterator[Path]:
        """Directories from this process's group up to the mount.

        Inside a container the group's path is often that of the host and does not exist below the mount,
        which is already the container's own group: levels that are missing are skipped.
        """
        path = Path(self.group.strip("/"))
        for level in (path, *path.parents) if path.parts else (path,):
            if (self.mount / level / self.limit).is_file():
                yield self.mount / level


@dataclass(frozen=True)
class Host:
    """The host as this process sees it; ``proc`` and ``sys`` are where the kernel's files are mounted.

    ``allowed`` are the processors it may run on.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    allowed: frozenset[int] = ALLOWED_CPUS

    def total_memory_bytes(self) -> int:
        """Physical memory, or the tightest limit (v1 or v2) of this control group and those above if less."""
        limits = [_number(level / h.limit) for h in self._memory() for level in h.levels()]
        return min([self._meminfo("MemTotal"), *(limit for limit in limits if limit is not None)])

    def available_memory_bytes(self) -> int:
        """Memory that can be allocated without swapping, within every control-group limit.

        File cache that the kernel would give back (``inactive_file``) counts as available, as in
        ``MemAvailable``.
        """
        room = [self._meminfo("MemAvailable")]
        for hierarchy in self._memory():
            for level in hierarchy.levels():
                limit, usage = _number(level / hierarchy.limit), _number(level / hierarchy.usage)
                if limit is not None and usage is not None:
                    room.append(limit - usage + _field(level / "memory.stat", hierarchy.inactive))
        return max(0, min(room))

    def cpus(self) -> list[int]:
        """Processor ids this process should compute on, hardware threads of one core next to each other.

        They are those of ``allowed``. A control-group CPU quota below that number shortens
        the list: more threads than quota are stopped in the middle of every step. Where it starts then
        differs between containers, or all containers of a host would pin to the same first processors.
        """
        ordered = sorted(self.allowed, key=self._place)
        quota = self._cpu_quota()
        if quota is None or quota >= len(ordered):
            return ordered
        count = max(1, math.ceil(quota))
        where = platform.node() + self._groups().get("", "")
        start = zlib.crc32(where.encode()) % (len(ordered) // count) * count
        return ordered[start : start + count]

    def isa_flags(self) -> tuple[str, ...]:
        """Instruction-set flags of the first processor, sorted; empty where the kernel does not list them."""
        for line in _lines(self.proc / "cpuinfo"):
            key, _, value = line.partition(":")
            if key.strip().lower() in ("flags", "features"):
                return tuple(sorted(value.split()))
        return ()

    def _place(self, cpu: int) -> tuple[int, int, int]:
        topology = self.sys / f"devices/system/cpu/cpu{cpu}/topology"
        package, core = _number(topology / "physical_package_id"), _number(topology / "core_id")
        return (package or 0, cpu if core is None else core, cpu)

    def _meminfo(self, key: str) -> int:
        return _field(self.proc / "meminfo", key + ":") * 1024

    def _groups(self) -> dict[str, str]:
        """Group path by controller name; the unified (v2) hierarchy has the empty name."""
        groups = {}
        for line in _lines(self.proc / "self" / "cgroup"):
            _, controllers, group = line.split(":", 2)
            groups.update(dict.fromkeys(controllers.split(","), group))
        return groups

    def _memory(self) -> list[_Hierarchy]:
        groups, root = self._groups(), self.sys / "fs/cgroup"
        found = []
        if "" in groups:
            # Beyond memory.high a group is not ended but stopped until it has given memory back: unusable too.
            for mount, limit in itertools.product((root, root / "unified"), ("memory.max", "memory.high")):
                found.append(_Hierarchy(mount, groups[""], limit, "memory.current", "inactive_file"))
        if "memory" in groups:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found.append(_Hierarchy(root / "memory", groups["memory"], *names))
        return found

    def _cpu_quota(self) -> float | None:
        groups, root = self._groups(), self.sys / "fs/cgroup"
        quotas = []
        if "" in groups:
            for level in _Hierarchy(root, groups[""], "cpu.max", "", "").levels():
                quota, period = _lines(level / "cpu.max")[0].split()
                if quota != "max":
                    quotas.append(int(quota) / int(period))
        if "cpu" in groups:
            for level in _Hierarchy(root / "cpu", groups["cpu"], "cpu.cfs_quota_us", "", "").levels():
                spent, span = _number(level / "cpu.cfs_quota_us"), _number(level / "cpu.cfs_period_us")
                if spent is not None and span is not None and spent > 0 and span > 0:
                    quotas.append(spent / span)
        return min(quotas, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number a file holds; None if it is missing or says ``max``."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].lstrip("-").isdecimal() else None


def _field(path: Path, key: str) -> int:
    """The number after ``key`` in a file of ``key number`` lines; 0 if absent."""
    for line in _lines(path):
        words = line.split()
        if len(words) >= 2 and words[0] == key:
            return int(words[1])
    return 0
