# SPDX-License-Identifier: Apache-2.0
"""One lock per key, that says who holds it and outlives no holder.

A lock saves work; no entry depends on it, because an entry appears by one rename and is checked before use. So a lock
whose holder cannot be asked is broken rather than waited for: the worst that follows is a second compile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from neuron_core.errors import CacheError
from neuron_core.graphs.cache.process import ProcessMark

__all__ = ["KeyLocks", "Owner"]

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""How often a waiter asks whether the holder still lives."""

REPORT_EVERY_S = 5.0
"""How often a waiter says for whom it waits."""

GRACE_S = 1.5
"""How long a lock must look abandoned: a new holder writes its record a moment after it has the lock."""

HEARTBEAT_S = 15.0
"""How often the holder of a soft lock touches its record, for waiters of other hosts."""

SILENCE_S = 120.0
"""Without a heartbeat for this long, the holder of a soft lock on another host is taken for dead."""

_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)


@dataclass(frozen=True)
class Owner:
    """Who holds a lock, ``doing`` what, and ``since`` when (seconds since 1970)."""

    process: ProcessMark
    doing: str
    since: float

    @classmethod
    def from_text(cls, text: str) -> Owner | None:
        """Read a record; None for one that is damaged or half written."""
        try:
            data = json.loads(text)
            return cls(ProcessMark.from_json(data), str(data["doing"]), float(data["since"]))
        except (ValueError, KeyError, TypeError):
            return None

    def to_text(self) -> str:
        """The record as a file holds it."""
        facts = {"host": self.process.host, "doing": self.doing, "since": self.since}
        return json.dumps({**self.process.to_json(), **facts})

    def __str__(self) -> str:
        return f"{self.process}, {self.doing} for {max(0.0, time.time() - self.since):.0f} s"


class KeyLocks:
    """The locks of one cache directory, by name; ``timeout_s`` bounds the wait for one.

    ``flock`` where the file system has it, which the system releases when the holder ends; otherwise a file that
    exists while the lock is held.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder = folder
        self.timeout_s = timeout_s
        self._soft: bool | None = None

    @contextlib.contextmanager
    def hold(self, name: str, doing: str) -> Iterator[None]:
        """Hold the lock ``name``, waiting for another holder and saying so; ``doing`` is what waiters are told.

        Raises ``CacheError`` naming the holder after ``timeout_s``, and ``OSError`` when the folder cannot be
        written.
        """
        lock = self._lock(name)
        self._wait(lock, name)
        with self._owned(lock, name, doing):
            yield

    @contextlib.contextmanager
    def try_hold(self, name: str, doing: str) -> Iterator[bool]:
        """Hold the lock if nobody does; gives whether it is held."""
        lock = self._lock(name)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            yield False
            return
        with self._owned(lock, name, doing):
            yield True

    def owner(self, name: str) -> Owner | None:
        """Who last said to hold the lock; it may have ended since."""
        return Owner.from_text(_text(self._record(name)))

    def remove_old(self, older_than_s: float, dry_run: bool = False) -> int:
        """Remove the files of locks nobody holds and nobody touched for that long; returns how many."""
        removed = 0
        for path in (
            *self.folder.glob("*.lock"),
            *self.folder.glob("*.softlock"),
            *self.folder.glob("*.owner"),
        ):
            try:
                if time.time() - path.stat().st_mtime < older_than_s:
                    continue
                removed += dry_run or self._remove_unheld(path)
            except FileNotFoundError:
                continue  # gone with its lock
        return removed

    def _remove_unheld(self, path: Path) -> bool:
        lock = self._lock(path.stem)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return False
        try:
            # While held: whoever opened this file notices that it is gone and opens the next one.
            path.unlink(missing_ok=True)
            self._record(path.stem).unlink(missing_ok=True)
        finally:
            lock.release()
        return True

    def _lock(self, name: str) -> filelock.BaseFileLock:
        if self._soft is None:
            self._soft = _lacks_flock(self.folder)
        if self._soft:
            return filelock.SoftFileLock(self.folder / f"{name}.softlock")
        return filelock.FileLock(self.folder / f"{name}.lock")

    def _record(self, name: str) -> Path:
        return self.folder / f"{name}.owner"

    @contextlib.contextmanager
    def _owned(self, lock: filelock.BaseFileLock, name: str, doing: str) -> Iterator[None]:
        record = self._record(name)
        mine = Owner(ProcessMark.current(), doing, time.time()).to_text()
        try:
            record.write_text(mine)
            with _heartbeat(record) if self._soft else contextlib.nullcontext():
                yield
        finally:
            if _text(record) == mine:
                record.unlink(missing_ok=True)
            lock.release()

    def _wait(self, lock: filelock.BaseFileLock, name: str) -> None:
        begun = time.monotonic()
        report_at = REPORT_EVERY_S / 2
        watch = _Watch(Path(lock.lock_file), self._record(name), bool(self._soft))
        while True:
            left = self.timeout_s - (time.monotonic() - begun)
            try:
                lock.acquire(timeout=max(0.0, min(LOOK_EVERY_S, left)), poll_interval=0.05)
                return
            except filelock.Timeout:
                waited = time.monotonic() - begun
            except FileNotFoundError:
                if not self.folder.is_dir():
                    raise
                continue  # an old lock was removed between the look and the open
            if watch.abandoned():
                watch.break_lock()
            elif waited >= self.timeout_s:
                raise CacheError(self._timeout_message(Path(lock.lock_file), name, waited))
            elif waited >= report_at:
                report_at += REPORT_EVERY_S
                owner = self.owner(name) or "another process"
                logger.info("compile cache: waiting for %s (%s)", owner, name[:12])

    def _timeout_message(self, file: Path, name: str, waited: float) -> str:
        owner = self.owner(name) or "another process"
        return (
            f"{file} was not free within {waited:.0f} s: held by {owner}; "
            "end that process, or wait longer with a larger lock_timeout_s"
        )


@dataclass
class _Watch:
    """Decides whether a lock that is held has no holder left."""

    lock_file: Path
    record: Path
    soft: bool
    _seen: Any = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)

    def abandoned(self) -> bool:
        """Whether lock and record stayed the same for long enough while nobody vouched for them."""
        evidence = self._evidence()
        if evidence is None or evidence != self._seen:
            self._seen, self._since = evidence, time.monotonic()
            return False
        unchanged_s = time.monotonic() - self._since
        owner = Owner.from_text(_text(self.record))
        if owner is None:
            # Under flock the system knows that somebody holds it; a soft lock without a record has lost its holder.
            return self.soft and unchanged_s > GRACE_S
        if owner.process.is_local:
            # Under flock too: a child of the dead holder may keep its descriptor, and with it the lock.
            return unchanged_s > GRACE_S and owner.process.is_gone
        return self.soft and unchanged_s > SILENCE_S

    def break_lock(self) -> None:
        """Remove the lock, unless it changed hands since the last look."""
        if self._evidence() == self._seen:
            logger.warning("compile cache: %s belongs to a process that ended; it is broken", self.lock_file)
            self.record.unlink(missing_ok=True)
            self.lock_file.unlink(missing_ok=True)
        self._seen = None

    def _evidence(self) -> tuple[Any, ...] | None:
        try:
            lock = self.lock_file.stat()
        except OSError:
            return None
        beat: float | None = None
        if self.soft:
            with contextlib.suppress(OSError):
                beat = self.record.stat().st_mtime
        # Waiters open the file of an flock, which may change its times; they leave a soft lock's file alone.
        return lock.st_ino, lock.st_mtime if self.soft else None, _text(self.record), beat


@contextlib.contextmanager
def _heartbeat(record: Path) -> Iterator[None]:
    """Touch the record from time to time while the body runs."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(record)

    thread = threading.Thread(target=beat, name="neuron-cache-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _lacks_flock(folder: Path) -> bool:
    """Whether the file system of ``folder`` has no ``flock``; raises ``OSError`` when it cannot be written."""
    probe = folder / f"probe-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        with open(probe, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        logger.warning("compile cache: %s has no file locks; files stand in for them", folder)
        return True
    finally:
        probe.unlink(missing_ok=True)
    return False
