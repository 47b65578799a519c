# SPDX-License-Identifier: Apache-2.0
"""``CompileCache``: finds an entry here or in a remote store, or has it compiled once."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from neuron_core.errors import CacheError, CompileError
from neuron_core.graphs.cache.counters import CacheCounters
from neuron_core.graphs.cache.entry import (
    SENTINEL,
    CacheEntry,
    describe_files,
    identity_of,
    read_entry,
    seal,
    verify_entry,
)
from neuron_core.graphs.cache.eviction import PRUNE_LOCK, PruneReport, check_limits, prune, total_bytes
from neuron_core.graphs.cache.failures import FULL_BYTES, Failure, RecordedFailure, is_recordable
from neuron_core.graphs.cache.fallback import Roots, UnwritableError
from neuron_core.graphs.cache.records import key_of
from neuron_core.graphs.cache.root import CacheRoot, delete
from neuron_core.graphs.cache.source import RemoteSource
from neuron_core.graphs.cache.usage import touch
from neuron_core.graphs.key import GraphKey

__all__ = ["CompileCache", "CompileInto"]

logger = logging.getLogger(__name__)

CompileInto = Callable[[Path], Mapping[str, Any]]
"""``compile_into(staging)`` writes an artifact's files and returns facts for the manifest."""


class CompileCache:
    """Compiled graphs under ``root`` (``VLLM_NEURON_CACHE_DIR``), shared by any number of processes.

    A root that cannot be written is still read; new entries then go to a private temporary directory, removed
    when the process ends, with a warning naming the path. ``CacheError`` naming the path is raised when that
    fails too. ``lock_timeout_s`` bounds the wait for another process that compiles the same key. ``remote`` is
    asked for what is not here. ``max_bytes`` evicts after each new entry, least recently used first.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        lock_timeout_s: float = 1800.0,
        remote: RemoteSource | None = None,
        max_bytes: int | None = None,
    ) -> None:
        check_limits(max_bytes, None)
        self.root = Path(root).expanduser().absolute()
        self.lock_timeout_s = lock_timeout_s
        self.remote = remote
        self.max_bytes = max_bytes
        self.counters = CacheCounters()
        self._roots = Roots(self.root, lock_timeout_s)
        self._absent: set[str] = set()
        self._said_large = False
        self._refused_before = 0 if remote is None else remote.counters.refused
        self._guard = threading.Lock()

    @property
    def toolchain_dir(self) -> Path:
        """Folder for compilers' scratch files; never loaded from."""
        return self._roots.writable.toolchain

    def lookup(self, digest: str) -> CacheEntry | None:
        """The entry of a key if it is here, complete and every file matches its hash; neither waits nor counts a hit.

        It is in use by this process from now on. An entry that fails its check is counted as invalid and removed.
        """
        for root in self._roots:
            found = self._checked(root, digest)
            if found is not None:
                return found
        return None

    def find(self, digest: str) -> CacheEntry | None:
        """Like ``lookup``, and when the key is not here, what the remote store has of it, kept here from now on.

        Waits for a process that compiles the key; raises ``CacheError`` after ``lock_timeout_s``. Counts remote
        hits and misses only.
        """
        found = self.lookup(digest)
        if found is not None or self.remote is None or digest in self._absent:
            return found

        def fetch(root: CacheRoot) -> CacheEntry | None:
            with root.locks.hold(digest, "fetching"):
                return self.lookup(digest) or self._fetched(root, digest)

        return self._roots.run(fetch)

    def get_or_compile(
        self,
        key: GraphKey,
        compile_into: CompileInto,
        *,
        retry_failed: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> tuple[CacheEntry, bool]:
        """The entry of ``key`` and whether this call compiled it.

        ``compile_into(staging)`` writes the artifact's files and returns facts for the manifest. Only one process
        compiles a key; others wait for it. ``facts`` are known before compiling, such as ``compiler``, ``version``
        and ``flags``; manifest and failure records keep them. Raises what ``compile_into`` raises;
        ``RecordedFailure`` (a ``CompileError``) when compiling this key failed before, unless ``retry_failed``;
        ``CacheError`` after ``lock_timeout_s`` or when nothing can be written.
        """
        asked_at = time.time()
        found = self.lookup(key.digest)
        if found is not None:
            self.count_hit(found)
            return found, False

        def make(root: CacheRoot) -> tuple[CacheEntry, bool]:
            with root.locks.hold(key.digest, "compiling"):
                found = self.lookup(key.digest) or self._fetched(root, key.digest)
                if found is not None:
                    self.count_hit(found)
                    return found, False
                self._raise_recorded(key.digest, asked_at if retry_failed else None)
                self.counters.add("misses")
                return self._compiled(root, key, compile_into, dict(facts or {})), True

        result = self._roots.run(make)
        if result[1] and self.max_bytes is not None:
            self._shrink(self.max_bytes)
        return result

    def count_hit(self, entry: CacheEntry) -> None:
        """Count a graph that needed no compile, and the seconds that saved."""
        self.counters.add("hits")
        self.counters.add("seconds_saved", entry.seconds)

    def get_request(self, digest: str) -> dict[str, Any] | None:
        """What ``put_request`` stored, here or remotely, or None; a damaged record is as good as none."""
        for root in self._roots:
            record = root.records.get(digest)
            if record is not None:
                return record
        if self.remote is None:
            return None
        record = self.remote.fetch_request(digest)
        self._count_refused()
        if record is not None:
            self.put_request(digest, record)
        return record

    def put_request(self, digest: str, record: Mapping[str, Any]) -> None:
        """Store a JSON-ready record; losing it costs one capture, so failure is only logged."""
        try:
            self._roots.writable.records.put(digest, record)
        except OSError as error:
            logger.warning(
                "compile cache: %s cannot be written: %s", self._roots.writable.records.path(digest), error
            )

    def requests_of(self, digest: str) -> dict[str, dict[str, Any]]:
        """The request records that lead to the entry of ``digest``, by request key."""
        found: dict[str, dict[str, Any]] = {}
        for root in reversed(tuple(self._roots)):
            found.update({name: record for name, record in root.records if key_of(record) == digest})
        return found

    def entries(self) -> Iterator[CacheEntry]:
        """Every complete entry by key, its files unread; the manifest of a damaged one may be empty."""
        seen: set[str] = set()
        for root in self._roots:
            for folder in sorted(root.graphs.glob("*")):
                if folder.name in seen or not (folder / SENTINEL).is_file():
                    continue
                seen.add(folder.name)
                try:
                    yield read_entry(folder)
                except CacheError:
                    yield CacheEntry(folder, {})

    def verify(self, digest: str) -> None:
        """Raise ``CacheError`` naming what is wrong with an entry, or that there is none; changes nothing."""
        for root in self._roots:
            folder = root.entry_folder(digest)
            if (folder / SENTINEL).is_file():
                verify_entry(folder, digest)
                return
        raise CacheError(f"{self.root / 'graphs' / digest} does not exist or is not complete")

    def failures(self) -> list[Failure]:
        """The recorded failures, by key."""
        found = {
            failure.digest: failure for root in reversed(tuple(self._roots)) for failure in root.failures
        }
        return [found[digest] for digest in sorted(found)]

    def prune(
        self, max_bytes: int | None = None, older_than_s: float | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Evict entries until at most ``max_bytes`` remain and none was last used longer than ``older_than_s`` ago.

        The least recently used go first; an entry that a living process has loaded stays. Request records without
        an entry, unused locks, old failures and what dead processes left go too. ``dry_run`` only says what would
        go. Raises ``CacheError`` when the root cannot be written, ``ConfigError`` for a limit below zero.
        """
        if dry_run:
            return prune(self._roots.shared, max_bytes, older_than_s, dry_run)
        if self._roots.is_private:
            raise CacheError(f"{self.root} cannot be written, so nothing can be removed from it")
        try:
            with self._roots.shared.locks.hold(PRUNE_LOCK, "pruning"):
                report = prune(self._roots.shared, max_bytes, older_than_s, dry_run)
        except OSError as error:
            raise CacheError(f"compile cache {self.root}: {error}") from error
        self.counters.add("evicted", len(report.evicted))
        return report

    def invalidate(self, digest: str) -> None:
        """Remove an entry that verified but cannot be loaded."""
        self.counters.add("invalid")
        for root in self._roots:
            root.discard(root.entry_folder(digest))

    def _checked(self, root: CacheRoot, digest: str) -> CacheEntry | None:
        folder = root.entry_folder(digest)
        looked_damaged = None
        while (seen := identity_of(folder)) is not None:
            root.marks.mark(digest)
            if identity_of(folder) is None:
                return None
            try:
                entry, size = verify_entry(folder, digest)
            except CacheError as error:
                # An entry that is replaced or evicted while it is read looks damaged: look again.
                if seen == looked_damaged:
                    logger.warning("compile cache: %s; it is rebuilt", error)
                    self.counters.add("invalid")
                    root.discard(folder)
                    return None
                looked_damaged = seen
                continue
            touch(folder)
            self.counters.add("bytes_read", size)
            return entry
        return None

    def _fetched(self, root: CacheRoot, digest: str) -> CacheEntry | None:
        """What the remote store has, checked and published like a compiled entry; under the key's lock."""
        if self.remote is None or digest in self._absent:
            return None
        staging = root.new_staging(digest)
        try:
            if not self.remote.fetch(digest, staging):
                self._absent.add(digest)
                self.counters.add("remote_misses")
                return None
            seal(staging)
            entry = self._published(root, verify_entry(staging, digest)[0], digest)
        except (CacheError, FileExistsError, FileNotFoundError) as error:
            self._absent.add(digest)
            logger.warning("compile cache: the remote entry is refused: %s", error)
            self.counters.add("remote_refused")
            return None
        finally:
            self._count_refused()
            delete(staging)
        self.counters.add("remote_hits")
        self.counters.add("bytes_downloaded", entry.listed_bytes)
        return entry

    def _compiled(
        self, root: CacheRoot, key: GraphKey, compile_into: CompileInto, facts: Mapping[str, Any]
    ) -> CacheEntry:
        try:
            return self._write(root, key, compile_into, facts)
        except CompileError as error:
            if root is self._roots.shared and shutil.disk_usage(root.path).free < FULL_BYTES:
                raise UnwritableError from error
            self._record(root, key, error, facts)
            raise

    def _record(self, root: CacheRoot, key: GraphKey, error: CompileError, facts: Mapping[str, Any]) -> None:
        try:
            if is_recordable(error, root.path):
                root.failures.record(key.digest, error, {"components": dict(key.components), **facts})
                self.counters.add("failures_recorded")
        except OSError as problem:
            logger.warning("compile cache %s: a failed compile cannot be recorded: %s", root.path, problem)

    def _write(
        self, root: CacheRoot, key: GraphKey, compile_into: CompileInto, facts: Mapping[str, Any]
    ) -> CacheEntry:
        staging = root.new_staging(key.digest)
        try:
            start = time.perf_counter()
            found = compile_into(staging)
            manifest = {
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(time.perf_counter() - start, 3),
                **facts,
                **found,
                "key": key.digest,
                "components": dict(key.components),
                "files": describe_files(staging),
            }
            seal(staging, manifest)
            entry = self._published(root, CacheEntry(staging, manifest), key.digest)
        finally:
            delete(staging)
        self.counters.add("bytes_written", entry.listed_bytes)
        return entry

    def _published(self, root: CacheRoot, staged: CacheEntry, digest: str) -> CacheEntry:
        entry = root.publish(staged, digest)
        for other in self._roots:
            other.failures.remove(digest)
        return entry

    def _raise_recorded(self, digest: str, retry_before: float | None) -> None:
        """Raise the failure of a key, unless it is to be tried again and did not fail since that was asked."""
        for root in self._roots:
            failure = root.failures.get(digest)
            if failure is not None and (retry_before is None or failure.created_s >= retry_before):
                raise RecordedFailure(failure)

    def _shrink(self, limit: int) -> None:
        root = self._roots.writable
        if total_bytes(root) <= limit:
            return
        try:
            with root.locks.try_hold(PRUNE_LOCK, "pruning") as held:
                if not held:
                    return  # another process is at it
                report = prune(root, limit, None, dry_run=False)
        except OSError as error:
            logger.warning("compile cache: %s cannot be pruned: %s", root.path, error)
            return
        self.counters.add("evicted", len(report.evicted))
        if report.kept_bytes > limit and not self._said_large:
            self._said_large = True
            logger.warning(
                "compile cache %s: %d bytes are in use, more than the limit of %d; nothing in use is evicted",
                root.path,
                report.kept_bytes,
                limit,
            )

    def _count_refused(self) -> None:
        if self.remote is not None:
            with self._guard:
                refused = self.remote.counters.refused
                self.counters.add("remote_refused", refused - self._refused_before)
                self._refused_before = refused
