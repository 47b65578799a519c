# SPDX-License-Identifier: Apache-2.0
"""Where a cache reads and writes: the directory it was given, and a private one when that cannot be written."""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TypeVar

from neuron_core.errors import CacheError
from neuron_core.graphs.cache.root import CacheRoot

__all__ = ["Roots", "UnwritableError"]

logger = logging.getLogger(__name__)

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_T = TypeVar("_T")


class UnwritableError(Exception):
    """A directory turned out to be read-only or full while writing; never leaves ``Roots.run``."""


class Roots:
    """``shared`` is the directory of the user, ``writable`` that or a private one; iterating gives where to look.

    Raises ``CacheError`` naming the path when there is no place to write at all.
    """

    def __init__(self, path: Path, lock_timeout_s: float) -> None:
        self.lock_timeout_s = lock_timeout_s
        self.shared = CacheRoot(path, lock_timeout_s)
        self.writable = self.shared
        self._guard = threading.Lock()
        try:
            self.shared.prepare()
        except OSError as error:
            self._fall_back(self.shared, error)
        self.writable.clean_staging()

    @property
    def is_private(self) -> bool:
        """Whether what is written now is lost when this process ends."""
        return self.writable is not self.shared

    def __iter__(self) -> Iterator[CacheRoot]:
        return iter((self.writable, self.shared) if self.is_private else (self.shared,))

    def run(self, action: Callable[[CacheRoot], _T]) -> _T:
        """Run ``action`` on the directory to write to, and again on a private one if that cannot be written.

        Raises what ``action`` raises; ``CacheError`` for an ``OSError``.
        """
        while True:
            root = self.writable
            try:
                return action(root)
            except UnwritableError as error:
                self._fall_back(root, error.__cause__ or error)
            except OSError as error:
                if error.errno not in _UNWRITABLE:
                    raise CacheError(f"compile cache {root.path}: {error}") from error
                self._fall_back(root, error)

    def _fall_back(self, failed: CacheRoot, cause: BaseException) -> None:
        with self._guard:
            if failed is not self.writable:
                return  # another thread did already
            if self.is_private:
                raise CacheError(
                    f"neither {self.shared.path} nor {failed.path} can be written: {cause}"
                ) from cause
            try:
                private = CacheRoot(Path(tempfile.mkdtemp(prefix="neuron-cache-")), self.lock_timeout_s)
                private.prepare()
            except OSError as error:
                raise CacheError(
                    f"{self.shared.path} cannot be written ({cause}), nor a temporary directory: {error}"
                ) from error
            # Not atexit: worker processes of multiprocessing end without it, and forked ones run their parent's.
            Finalize(None, shutil.rmtree, (private.path,), {"ignore_errors": True}, exitpriority=10)
            logger.warning(
                "compile cache %s cannot be written (%s): graphs go to %s and are lost when this process ends",
                self.shared.path,
                cause,
                private.path,
            )
            self.writable = private
