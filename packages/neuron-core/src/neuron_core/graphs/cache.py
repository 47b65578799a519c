# SPDX-License-Identifier: Apache-2.0
"""The local compile cache: one verified directory per graph key.

Layout under the root: ``graphs/<key>/`` (complete entries), ``requests/<key>.json``, ``staging/`` (entries
being written), ``locks/``, ``toolchain/`` (compilers' scratch). An entry appears by one rename and is loaded
only after the SHA-256 of each of its files matched its manifest.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from neuron_core.errors import CacheError, CompileError
from neuron_core.graphs.key import GraphKey, text_digest

__all__ = ["CacheCounters", "CacheEntry", "CompileCache"]

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SENTINEL = "COMPLETE"
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_FOREIGN_STAGING_MAX_AGE_S = 24 * 3600.0
_FULL_BYTES = 32 << 20


@dataclass
class CacheCounters:
    """What this process asked of the cache; ``invalid`` entries failed their check and were rebuilt."""

    hits: int = 0
    misses: int = 0
    invalid: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __post_init__(self) -> None:
        """Compile threads count too."""
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one counter."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)


@dataclass(frozen=True)
class CacheEntry:
    """A verified entry: its folder and its manifest."""

    path: Path
    manifest: Mapping[str, Any]


class _Unwritable(Exception):
    """The root turned out to be read-only or full while writing."""


class CompileCache:
    """Compiled graphs under ``root`` (``VLLM_NEURON_CACHE_DIR``), shared by any number of processes.

    A root that cannot be written is still read; new entries then go to a private temporary directory, removed
    when the process ends, with a warning naming the path. ``CacheError`` naming the path is raised when that
    fails too. ``lock_timeout_s`` bounds the wait for another process that compiles the same key.
    """

    def __init__(self, root: Path | str, *, lock_timeout_s: float = 1800.0) -> None:
        self.root = Path(root).expanduser().absolute()
        self.lock_timeout_s = lock_timeout_s
        self.counters = CacheCounters()
        self._writable = self.root
        try:
            self._prepare(self.root)
        except OSError as error:
            self._fall_back(error)
        self._clean_staging()

    @property
    def toolchain_dir(self) -> Path:
        """Folder for compilers' scratch files; never loaded from."""
        return self._writable / "toolchain"

    def lookup(self, digest: str) -> CacheEntry | None:
        """The entry of a key if it is complete and every file matches its hash; neither waits nor counts.

        An entry that fails its check is counted as invalid and removed.
        """
        for root in dict.fromkeys((self._writable, self.root)):
            folder = root / "graphs" / digest
            if not (folder / SENTINEL).is_file():
                continue
            try:
                return self._verified(folder, digest)
            except CacheError as error:
                logger.warning("compile cache: %s; it is rebuilt", error)
                self.counters.add("invalid")
                self._discard(folder)
        return None

    def get_or_compile(
        self, key: GraphKey, compile_into: Callable[[Path], Mapping[str, Any]]
    ) -> tuple[CacheEntry, bool]:
        """The entry of ``key`` and whether this call compiled it.

        ``compile_into(staging)`` writes the artifact's files and returns facts for the manifest. Only one
        process compiles a key; others wait for it. Raises what ``compile_into`` raises, and ``CacheError``
        after ``lock_timeout_s`` or when nothing can be written.
        """
        found = self.lookup(key.digest)
        if found is not None:
            self.counters.add("hits")
            return found, False
        try:
            return self._compile_locked(key, compile_into)
        except _Unwritable as error:
            self._fall_back(error.__cause__ or error)
            return self._compile_locked(key, compile_into)

    def get_request(self, digest: str) -> dict[str, Any] | None:
        """What ``put_request`` stored, or None; a damaged record is as good as none."""
        for root in dict.fromkeys((self._writable, self.root)):
            try:
                stored = json.loads((root / "requests" / f"{digest}.json").read_text())
                record: dict[str, Any] = stored["record"]
                if stored["sha256"] == text_digest(json.dumps(record, sort_keys=True)):
                    return record
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return None

    def put_request(self, digest: str, record: Mapping[str, Any]) -> None:
        """Store a JSON-ready record; losing it costs one capture, so failure is only logged."""
        content = json.dumps(record, sort_keys=True)
        final = self._writable / "requests" / f"{digest}.json"
        temporary = final.with_name(f"{digest}.{uuid.uuid4().hex}.tmp")
        try:
            temporary.write_text(json.dumps({"sha256": text_digest(content), "record": json.loads(content)}))
            os.replace(temporary, final)
        except OSError as error:
            logger.warning("compile cache: %s cannot be written: %s", final, error)

    def invalidate(self, digest: str) -> None:
        """Remove an entry that verified but cannot be loaded."""
        self.counters.add("invalid")
        for root in dict.fromkeys((self._writable, self.root)):
            self._discard(root / "graphs" / digest)

    def _compile_locked(
        self, key: GraphKey, compile_into: Callable[[Path], Mapping[str, Any]]
    ) -> tuple[CacheEntry, bool]:
        lock = filelock.FileLock(self._writable / "locks" / f"{key.digest}.lock")
        try:
            with lock.acquire(timeout=self.lock_timeout_s):
                found = self.lookup(key.digest)
                if found is not None:
                    self.counters.add("hits")
                    return found, False
                self.counters.add("misses")
                return self._write(key, compile_into), True
        except filelock.Timeout as error:
            raise CacheError(
                f"another process has held {lock.lock_file} for {self.lock_timeout_s:.0f} s; end it or wait"
            ) from error
        except OSError as error:
            if error.errno in _UNWRITABLE:
                raise _Unwritable from error
            raise CacheError(f"compile cache {self._writable}: {error}") from error
        except CompileError as error:
            if self._writable == self.root and shutil.disk_usage(self._writable).free < _FULL_BYTES:
                raise _Unwritable from error
            raise

    def _write(self, key: GraphKey, compile_into: Callable[[Path], Mapping[str, Any]]) -> CacheEntry:
        name = f"{key.digest}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        staging = self._writable / "staging" / name
        staging.mkdir()
        try:
            start = time.perf_counter()
            facts = compile_into(staging)
            manifest = {
                "key": key.digest,
                "components": dict(key.components),
                "seconds": round(time.perf_counter() - start, 3),
                **facts,
                "files": _describe_files(staging),
            }
            (staging / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
            (staging / SENTINEL).touch()
            final = self._writable / "graphs" / key.digest
            self._discard(final)
            os.rename(staging, final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        self.counters.add("bytes_written", sum(file["size"] for file in manifest["files"].values()))
        return CacheEntry(final, manifest)

    def _verified(self, folder: Path, digest: str) -> CacheEntry:
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            files: dict[str, dict[str, Any]] = manifest["files"]
            named = manifest["key"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheError(f"{folder / MANIFEST} cannot be read: {error}") from error
        present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
        if named != digest or present != files.keys() | {MANIFEST, SENTINEL}:
            raise CacheError(f"{folder} does not hold what its manifest lists")
        for name, described in files.items():
            content = (folder / name).read_bytes()
            if (
                len(content) != described["size"]
                or hashlib.sha256(content).hexdigest() != described["sha256"]
            ):
                raise CacheError(f"{folder / name} does not match its SHA-256")
            self.counters.add("bytes_read", len(content))
        return CacheEntry(folder, manifest)

    def _discard(self, folder: Path) -> None:
        """Move an entry out of sight in one step, then delete it: a reader never sees half of one."""
        aside = (
            folder.parent.parent
            / "staging"
            / f"trash-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        )
        try:
            os.rename(folder, aside)
        except OSError:
            return  # already gone, or a read-only root whose entry is shadowed by ours
        shutil.rmtree(aside, ignore_errors=True)

    def _prepare(self, root: Path) -> None:
        for name in ("graphs", "requests", "staging", "locks"):
            (root / name).mkdir(parents=True, exist_ok=True)
        probe = root / "staging" / f"probe-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()

    def _fall_back(self, cause: BaseException) -> None:
        if self._writable != self.root:
            raise CacheError(f"neither {self.root} nor {self._writable} can be written: {cause}") from cause
        try:
            private = Path(tempfile.mkdtemp(prefix="neuron-cache-"))
            self._prepare(private)
        except OSError as error:
            raise CacheError(
                f"{self.root} cannot be written ({cause}), nor a temporary directory: {error}"
            ) from error
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        logger.warning(
            "compile cache %s cannot be written (%s): graphs go to %s and are lost when this process ends",
            self.root,
            cause,
            private,
        )
        self._writable = private

    def _clean_staging(self) -> None:
        for folder in (self._writable / "staging").glob("*"):
            if self._abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.unlink(missing_ok=True) if folder.is_file() else None

    def _abandoned(self, folder: Path) -> bool:
        name, _, _ = folder.name.rpartition("-")
        name, _, pid = name.rpartition("-")
        if not name.endswith(f"-{socket.gethostname()}") or not pid.isdigit():
            try:
                return time.time() - folder.stat().st_mtime > _FOREIGN_STAGING_MAX_AGE_S
            except OSError:
                return False
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


def _describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    described: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            described[file.relative_to(folder).as_posix()] = {"sha256": digest, "size": len(content)}
    return described
