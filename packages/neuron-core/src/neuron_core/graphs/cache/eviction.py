# SPDX-License-Identifier: Apache-2.0
"""What may go from a cache directory: entries by size and age, and what has lost its purpose."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from neuron_core.errors import ConfigError
from neuron_core.graphs.cache.entry import SENTINEL, CacheEntry
from neuron_core.graphs.cache.records import key_of
from neuron_core.graphs.cache.root import CacheRoot, delete

__all__ = ["DEBRIS_AGE_S", "PRUNE_LOCK", "PruneReport", "check_limits", "prune", "total_bytes"]

DEBRIS_AGE_S = 24 * 3600.0
"""Age at which request records without an entry and unused locks go, unless ``older_than_s`` says otherwise."""

PRUNE_LOCK = "prune"
"""Name of the lock under which one process at a time evicts."""


@dataclass
class PruneReport:
    """What ``prune`` removed, or with ``dry_run`` would remove.

    ``evicted`` and ``in_use`` are keys; those in use would have gone but for a living process that has them loaded.
    ``kept`` entries of ``kept_bytes`` stay. The last five count request records, recorded failures, lock files,
    leftovers of dead processes in ``staging`` and their marks in ``users``.
    """

    dry_run: bool = False
    evicted: list[str] = field(default_factory=list)
    evicted_bytes: int = 0
    in_use: list[str] = field(default_factory=list)
    kept: int = 0
    kept_bytes: int = 0
    requests: int = 0
    failures: int = 0
    locks: int = 0
    staging: int = 0
    users: int = 0


def check_limits(max_bytes: int | None, older_than_s: float | None) -> None:
    """Raise ``ConfigError`` for a limit below zero."""
    if max_bytes is not None and max_bytes < 0:
        raise ConfigError("max_bytes", max_bytes, "must be 0 or more bytes; 20 * 2**30 is 20 GiB")
    if older_than_s is not None and older_than_s < 0:
        raise ConfigError("older_than_s", older_than_s, "must be 0 or more seconds; 30 * 86400 is 30 days")


def prune(root: CacheRoot, max_bytes: int | None, older_than_s: float | None, dry_run: bool) -> PruneReport:
    """Evict entries until both limits hold, least recently used first, and remove debris; hold ``PRUNE_LOCK``.

    An entry that a living process has loaded stays, and so does what another process is writing.
    """
    check_limits(max_bytes, older_than_s)
    report = PruneReport(dry_run)
    _prune_entries(root, max_bytes, older_than_s, report)
    debris_age_s = DEBRIS_AGE_S if older_than_s is None else older_than_s
    report.requests = _remove_orphans(root, set(report.evicted), debris_age_s, dry_run)
    if older_than_s is not None:
        report.failures = _remove_failures(root, older_than_s, dry_run)
    report.locks = root.locks.remove_old(debris_age_s, dry_run)
    report.staging = root.clean_staging(dry_run)
    report.users = root.marks.remove_dead(dry_run)
    return report


def total_bytes(root: CacheRoot) -> int:
    """Bytes of all entries on disk."""
    return sum(entry.size_bytes for entry in _folders(root))


def _prune_entries(
    root: CacheRoot, max_bytes: int | None, older_than_s: float | None, report: PruneReport
) -> None:
    now = time.time()
    in_use = root.marks.in_use()
    found = [(entry.last_used, entry.size_bytes, entry) for entry in _folders(root)]
    report.kept, report.kept_bytes = len(found), sum(size for _, size, _ in found)
    for used, size, entry in sorted(found, key=lambda item: item[:2]):
        old = older_than_s is not None and now - used > older_than_s
        large = max_bytes is not None and report.kept_bytes > max_bytes
        broken = not (entry.path / SENTINEL).is_file()  # nobody reads it
        if not (old or large or broken):
            continue
        if entry.digest in in_use or not (report.dry_run or _evict(root, entry)):
            report.in_use.append(entry.digest)
            continue
        report.evicted.append(entry.digest)
        report.evicted_bytes += size
        report.kept -= 1
        report.kept_bytes -= size


def _folders(root: CacheRoot) -> list[CacheEntry]:
    return [CacheEntry(path, {}) for path in root.graphs.glob("*")]


def _evict(root: CacheRoot, entry: CacheEntry) -> bool:
    """Remove one entry; False when a process asked for it in between.

    Readers mark an entry and then look whether it is there, and no mark is made while this looks and moves it away.
    Where a file system has no locks, the second look finds what was marked meanwhile.
    """
    with root.marks.held():
        if entry.digest in root.marks.in_use():
            return False
        aside = root.set_aside(entry.path)
    if aside is None:
        return not entry.path.exists()
    if entry.digest in root.marks.in_use():
        try:
            os.rename(aside, entry.path)
        except OSError:
            delete(aside)  # already built again
        return False
    delete(aside)
    return True


def _remove_orphans(root: CacheRoot, evicted: set[str], older_than_s: float, dry_run: bool) -> int:
    """Remove request records that lead to no entry: at once after an eviction, else when old enough."""
    removed = 0
    for name, record in root.records:
        digest = key_of(record)
        path = root.records.path(name)
        orphan = digest is None or not (root.graphs / digest / SENTINEL).is_file()
        if digest in evicted or (orphan and _older(path, older_than_s)):
            removed += 1
            if not dry_run:
                path.unlink(missing_ok=True)
    for path in root.records.folder.glob("*.tmp"):
        if not dry_run and _older(path, DEBRIS_AGE_S):
            path.unlink(missing_ok=True)
    return removed


def _remove_failures(root: CacheRoot, older_than_s: float, dry_run: bool) -> int:
    old = [failure for failure in root.failures if time.time() - failure.created_s > older_than_s]
    for failure in old:
        if not dry_run:
            root.failures.remove(failure.digest)
    return len(old)


def _older(path: Path, age_s: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime > age_s
    except OSError:
        return False
