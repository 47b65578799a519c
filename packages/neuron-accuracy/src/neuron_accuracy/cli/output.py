# SPDX-License-Identifier: Apache-2.0
"""Standard output, which is the verdict's alone: an engine, a compiler or a library that prints does so elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TextIO

__all__ = ["output", "verdict_alone", "write"]

_kept: ContextVar[TextIO | None] = ContextVar("standard output", default=None)


@contextlib.contextmanager
def verdict_alone() -> Iterator[None]:
    """While the block runs only :func:`write` writes to standard output.

    All else that is written there goes to standard error, by the processes that the block starts too: vLLM logs to
    standard output, and its workers inherit the descriptor.
    """
    if _kept.get() is not None or sys.stdout is None or sys.stderr is None:
        yield
        return
    sys.stdout.flush()
    with _diverted(sys.stdout) as stream, contextlib.redirect_stdout(sys.stderr):
        token = _kept.set(stream)
        try:
            yield
        finally:
            _kept.reset(token)


def output() -> TextIO:
    """Standard output, inside of :func:`verdict_alone` or not."""
    return _kept.get() or sys.stdout


def write(text: str) -> None:
    """Write to standard output now.

    A reader that went away, such as ``head``, changes nothing about the verdict. Raises ``OSError`` if the text cannot
    be written for another reason.
    """
    stream = output()
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # What is left in the buffer has to go somewhere when the stream is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def _diverted(stdout: TextIO) -> Iterator[TextIO]:
    """A stream of its own to where standard output leads, whose descriptor leads to standard error meanwhile."""
    try:
        number, other = stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation):  # a test's, or a notebook's
        yield stdout
        return
    own = os.dup(number)
    os.dup2(other, number)
    stream = open(own, "w", encoding=stdout.encoding, errors="backslashreplace")  # noqa: SIM115 -- closed below
    try:
        yield stream
    finally:
        stdout.flush()
        os.dup2(own, number)
        with contextlib.suppress(OSError):  # told when it was written
            stream.close()
