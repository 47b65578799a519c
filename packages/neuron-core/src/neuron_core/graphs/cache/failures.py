# SPDX-License-Identifier: Apache-2.0
"""Compiles that failed, kept with their log so that the next start fails at once instead of in minutes."""

from __future__ import annotations

import datetime
import errno
import json
import shutil
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_core.errors import CompileError

if TYPE_CHECKING:
    from neuron_core.graphs.cache.root import CacheRoot

__all__ = ["FULL_BYTES", "Failure", "Failures", "RecordedFailure", "is_recordable"]

FULL_BYTES = 32 << 20
"""A disk with less than this free makes compilers fail in many ways."""

_FAILURE = "failure.json"
_LOG = "log.txt"
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)


@dataclass(frozen=True)
class Failure:
    """A recorded failure: the key, the compiler's message, when (ISO time), the log, and the facts of the key.

    ``facts`` are what the caller of ``get_or_compile`` knew: usually ``compiler``, ``version`` and ``flags``.
    """

    digest: str
    error: str
    created: str
    log: Path
    facts: Mapping[str, Any]

    @property
    def created_s(self) -> float:
        """``created`` in seconds since 1970."""
        return datetime.datetime.fromisoformat(self.created).timestamp()


class RecordedFailure(CompileError):
    """Compiling this graph failed before, nothing that decides the outcome changed, and it was not tried again."""

    recordable = False

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        failure = self.failure
        return (
            f"{failure.error}\n(failed on {failure.created} and was not tried again; log: {failure.log}; "
            "to try again set VLLM_NEURON_RETRY_FAILED=1, or pass retry_failed=True)"
        )


def is_recordable(error: CompileError, *folders: Path) -> bool:
    """Whether trying again unchanged would fail again.

    Not so when the compiler says otherwise (``error.recordable``), when a resource ran out on the way, or when the
    disk of one of ``folders`` or of the temporary directory is full.
    """
    if not getattr(error, "recordable", True):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError | KeyboardInterrupt):
            return False
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return False
        cause = cause.__cause__ or cause.__context__
    return all(
        shutil.disk_usage(folder).free >= FULL_BYTES for folder in (*folders, Path(tempfile.gettempdir()))
    )


class Failures:
    """``failures/<key>/`` of one cache directory: ``failure.json`` and ``log.txt``."""

    def __init__(self, root: CacheRoot, folder: Path) -> None:
        self._root = root
        self.folder = folder

    def record(self, digest: str, error: CompileError, facts: Mapping[str, Any]) -> Failure:
        """Keep a failure, replacing an older one of the key; raises ``OSError``."""
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        final = self.folder / digest
        failure = Failure(digest, str(error), created, final / _LOG, dict(facts))
        staging = self._root.new_staging(digest)
        content = {"key": digest, "error": failure.error, "created": created, "facts": failure.facts}
        (staging / _FAILURE).write_text(json.dumps(content, indent=1, sort_keys=True))
        (staging / _LOG).write_text(_log_of(failure, error), errors="backslashreplace")
        self._root.replace(staging, final)
        return failure

    def get(self, digest: str) -> Failure | None:
        """The failure of a key; a damaged record is as good as none."""
        folder = self.folder / digest
        try:
            data = json.loads((folder / _FAILURE).read_text())
            if data["key"] != digest:
                return None
            failure = Failure(digest, str(data["error"]), data["created"], folder / _LOG, dict(data["facts"]))
            return failure if failure.created_s else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def remove(self, digest: str) -> bool:
        """Forget the failure of a key; False when there is none, or it cannot be removed."""
        return (self.folder / digest).is_dir() and self._root.discard(self.folder / digest)

    def __iter__(self) -> Iterator[Failure]:
        """All recorded failures, by key."""
        names = sorted(path.name for path in self.folder.glob("*"))
        return (failure for name in names if (failure := self.get(name)) is not None)


def _log_of(failure: Failure, error: CompileError) -> str:
    """What a person needs to find the fault: facts, what programs printed, the traceback."""
    lines = [f"key: {failure.digest}", f"created: {failure.created}"]
    lines += [f"{name}: {value}" for name, value in failure.facts.items()]
    lines += ["", "".join(traceback.format_exception(error)).rstrip()]
    cause: BaseException | None = error
    while cause is not None:
        for name in ("log", "stdout", "stderr"):
            printed = getattr(cause, name, None)
            if isinstance(printed, bytes):
                printed = printed.decode(errors="replace")
            if isinstance(printed, str) and printed:
                lines += ["", f"{type(cause).__name__}.{name}:", printed.rstrip()]
        cause = cause.__cause__ or cause.__context__
    return "\n".join(lines) + "\n"
