# SPDX-License-Identifier: Apache-2.0
"""The folders of one cache directory, and what is done to them in one step."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from pathlib import Path

from neuron_core.errors import CacheError
from neuron_core.graphs.cache.entry import CacheEntry
from neuron_core.graphs.cache.failures import Failures
from neuron_core.graphs.cache.locks import KeyLocks
from neuron_core.graphs.cache.process import ProcessMark, place
from neuron_core.graphs.cache.records import RequestRecords
from neuron_core.graphs.cache.usage import UsageMarks

__all__ = ["CacheRoot"]

_FOREIGN_STAGING_MAX_AGE_S = 24 * 3600.0
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PUBLISH_ATTEMPTS = 5


class CacheRoot:
    """One cache directory.

    ``graphs/<key>/`` holds entries, ``staging/`` what is being written or deleted; ``locks``, ``failures``,
    ``records`` and ``marks`` look after a folder each. ``toolchain/`` is the compilers' own.
    """

    def __init__(self, path: Path, lock_timeout_s: float) -> None:
        self.path = path
        self.graphs = path / "graphs"
        self.staging = path / "staging"
        self.toolchain = path / "toolchain"
        self.locks = KeyLocks(path / "locks", lock_timeout_s)
        self.records = RequestRecords(path / "requests")
        self.marks = UsageMarks(path / "users")
        self.failures = Failures(self, path / "failures")

    def prepare(self) -> None:
        """Make the folders; raises ``OSError`` when they cannot be made or written."""
        for name in ("graphs", "requests", "staging", "locks", "failures", "users"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        probe = self._unique("probe")
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()

    def entry_folder(self, digest: str) -> Path:
        """Where the entry of a key is or would be; raises ``CacheError`` for what cannot be a key."""
        if not _DIGEST.fullmatch(digest):
            raise CacheError(f"{digest!r} is not a graph key: 64 hexadecimal digits, a name in {self.graphs}")
        return self.graphs / digest

    def new_staging(self, label: str) -> Path:
        """A new folder for what will be published, named after this process so that others know when it is left."""
        folder = self._unique(label)
        folder.mkdir()
        return folder

    def publish(self, staged: CacheEntry, digest: str) -> CacheEntry:
        """Make a sealed folder the entry of ``digest`` by one rename, in use by this process; raises ``OSError``."""
        final = self.entry_folder(digest)
        self.marks.mark(digest)
        self.replace(staged.path, final)
        return CacheEntry(final, staged.manifest)

    def replace(self, staging: Path, final: Path) -> None:
        """Rename a folder to ``final``, moving away what is there; raises ``OSError``."""
        for attempt in range(_PUBLISH_ATTEMPTS):
            self.discard(final)
            try:
                os.rename(staging, final)
                return
            except OSError as error:
                # Where file locks do not work, another process may have published the same key in between.
                taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
                if not taken or attempt == _PUBLISH_ATTEMPTS - 1:
                    raise

    def set_aside(self, folder: Path) -> Path | None:
        """Move a folder out of sight in one step; None when it is gone or cannot be moved."""
        aside = self._unique("trash")
        try:
            os.rename(folder, aside)
        except OSError:
            return None
        return aside

    def discard(self, folder: Path) -> bool:
        """Move a folder out of sight, then delete it: a reader never sees half of one. False when it stays."""
        aside = self.set_aside(folder)
        if aside is None:
            return False
        delete(aside)
        return True

    def clean_staging(self, dry_run: bool = False) -> int:
        """Delete what ended processes left in ``staging``; returns how many."""
        left = [path for path in self.staging.glob("*") if _is_abandoned(path)]
        for path in left:
            if not dry_run:
                delete(path)
        return len(left)

    def _unique(self, label: str) -> Path:
        me = ProcessMark.current()
        return self.staging / f"{label}-{me.place}-{me.pid}-{me.start:.2f}-{uuid.uuid4().hex[:8]}"


def delete(path: Path) -> None:
    """Delete a file, a link or a folder nobody can see; what resists is tried again by the next process."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    label, *numbers = path.name.rsplit("-", 3)
    try:
        if len(numbers) == 3 and label.endswith(f"-{place()}"):
            return ProcessMark(place(), int(numbers[0]), float(numbers[1])).is_gone
        return time.time() - path.lstat().st_mtime > _FOREIGN_STAGING_MAX_AGE_S
    except (OSError, ValueError):
        return False
