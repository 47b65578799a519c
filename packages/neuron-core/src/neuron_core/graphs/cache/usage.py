# SPDX-License-Identifier: Apache-2.0
"""Which entries processes have loaded, so that none is evicted under them, and when each was last asked for.

``users/<host>-<pid>`` lists the keys one process asked for, after a first line that names the process. It goes when
the process ends; after a kill, whoever looks finds the process gone. A process of another host cannot be looked for:
its file counts while it is younger than ``FOREIGN_MARK_MAX_AGE_S``, and every process touches its own file each
``REFRESH_EVERY_S``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

from neuron_core.graphs.cache.entry import SENTINEL
from neuron_core.graphs.cache.process import ProcessMark

__all__ = ["FOREIGN_MARK_MAX_AGE_S", "REFRESH_EVERY_S", "UsageMarks", "touch"]

logger = logging.getLogger(__name__)

FOREIGN_MARK_MAX_AGE_S = 24 * 3600.0
REFRESH_EVERY_S = 3600.0


class UsageMarks:
    """``users/`` of one cache directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mark(self, digest: str) -> None:
        """Say that this process uses an entry, until it ends.

        In a directory that cannot be written nothing is said: who can write there must not evict while others
        read.
        """
        if not _own.has(self.folder, digest):
            with self._guard(fcntl.LOCK_SH):
                _own.mark(self.folder, digest)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody marks an entry during the block: what is not in use now may go."""
        with self._guard(fcntl.LOCK_EX):
            yield

    def in_use(self) -> set[str]:
        """Keys of the entries that living processes use."""
        return {digest for path, alive in self._files() if alive for digest in _keys(path)}

    def remove_dead(self, dry_run: bool = False) -> int:
        """Remove the files of processes that ended; returns how many."""
        dead = [path for path, alive in self._files() if not alive]
        for path in dead:
            if not dry_run:
                path.unlink(missing_ok=True)
        return len(dead)

    @contextlib.contextmanager
    def _guard(self, kind: int) -> Iterator[None]:
        """Hold ``usage.lock``; where it cannot be locked, eviction looks a second time and may move an entry back."""
        descriptor = -1
        with contextlib.suppress(OSError):
            descriptor = os.open(
                self.folder.with_name("usage.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
            fcntl.flock(descriptor, kind)
        try:
            yield
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _files(self) -> Iterator[tuple[Path, bool]]:
        for path in self.folder.glob("*"):
            age = 0.0
            try:
                age = time.time() - path.stat().st_mtime
                process = ProcessMark.from_json(json.loads(_lines(path)[0]))
                alive = not process.is_gone if process.is_local else age < FOREIGN_MARK_MAX_AGE_S
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError, IndexError):
                alive = age < FOREIGN_MARK_MAX_AGE_S  # half written, or of another version
            yield path, alive


def touch(folder: Path) -> None:
    """Note that an entry was asked for now; a directory that cannot be written keeps its times."""
    with contextlib.suppress(OSError):
        os.utime(folder / SENTINEL)


class _OwnMarks:
    """The marks of this process, one file per cache directory."""

    _lock: threading.Lock
    _ended: threading.Event
    _thread: threading.Thread | None
    _digests: dict[Path, dict[str, None]]
    _process: ProcessMark | None

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def has(self, folder: Path, digest: str) -> bool:
        with self._lock:
            return digest in self._digests.get(folder, {}) and self._path(folder).exists()

    def mark(self, folder: Path, digest: str) -> None:
        with self._lock:
            known = self._digests.setdefault(folder, {})
            path = self._path(folder)
            try:
                if digest in known and path.exists():
                    return
                known[digest] = None
                if len(known) == 1 or not path.exists():
                    self._write(folder)
                else:
                    with open(path, "a", encoding="utf-8") as file:
                        file.write(f"{digest}\n")
            except OSError as error:
                logger.debug("compile cache: %s cannot say what is in use: %s", folder, error)
                return
            self._start()

    def refresh(self) -> None:
        with self._lock:
            for folder in self._digests:
                try:
                    os.utime(self._path(folder))
                except OSError:
                    with contextlib.suppress(OSError):  # the directory is gone, or cannot be written
                        self._write(folder)

    def _write(self, folder: Path) -> None:
        path = self._path(folder)
        temporary = path.with_name(f".{path.name}.tmp")
        lines = [json.dumps(self._me().to_json()), *self._digests[folder]]
        temporary.write_text("\n".join(lines) + "\n")
        os.replace(temporary, path)

    def _path(self, folder: Path) -> Path:
        return folder / f"{self._me().place}-{self._me().pid}"

    def _me(self) -> ProcessMark:
        if self._process is None:
            self._process = ProcessMark.current()
        return self._process

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="neuron-cache-usage", daemon=True)
            self._thread.start()
            # Not atexit, which does not run in worker processes of multiprocessing.
            Finalize(None, self._remove, exitpriority=10)

    def _run(self) -> None:
        while not self._ended.wait(REFRESH_EVERY_S):
            self.refresh()

    def _remove(self) -> None:
        self._ended.set()
        with self._lock:
            for folder in self._digests:
                with contextlib.suppress(OSError):
                    self._path(folder).unlink(missing_ok=True)

    def _reset(self) -> None:
        """Also in a forked child, which has neither the thread nor, yet, anything loaded of its own."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = None
        self._digests = {}
        self._process = None


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _keys(path: Path) -> list[str]:
    try:
        return _lines(path)[1:]
    except (OSError, ValueError):
        return []


_own = _OwnMarks()
