# SPDX-License-Identifier: Apache-2.0
"""Where a device's executions run, one after another: in the caller, or beside it in a thread of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from neuron_core.errors import DeviceError

__all__ = ["Execution", "InlineStream", "Stream", "ThreadStream"]

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0
"""How long ``ThreadStream.close`` waits for what is running; a rank whose peers died may wait in a collective."""


class Execution(Future[T]):
    """One piece of work on a stream, and when it ran."""

    started: float = 0.0
    """``time.perf_counter()`` seconds at which the stream began it."""
    ended: float = 0.0
    """``time.perf_counter()`` seconds at which the stream was free again."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._work: Callable[[], T] | None = work

    def run(self) -> None:
        """Do the work; its result or exception becomes that of the execution."""
        work, self._work = self._work, None
        if work is None:
            raise DeviceError("an execution runs once")
        self.started = time.perf_counter()
        try:
            result = work()
        except BaseException as error:
            self.ended = time.perf_counter()
            self.set_exception(error)
        else:
            self.ended = time.perf_counter()
            self.set_result(result)


class Stream(Protocol):
    """Runs what is submitted in the order of submission, never two at a time."""

    def submit(self, work: Callable[[], T]) -> Execution[T]:
        """Add ``work``. Raises ``DeviceError`` after ``close``."""
        ...

    def close(self) -> None:
        """Accept nothing more, and wait a few seconds for what was submitted."""
        ...


class InlineStream:
    """Runs work in the thread that submits it: submitting returns when the work is done."""

    def __init__(self) -> None:
        self._closed = False

    def submit(self, work: Callable[[], T]) -> Execution[T]:
        """Run ``work``; an exception is the execution's, not the caller's."""
        if self._closed:
            raise DeviceError("the stream is closed")
        execution = Execution(work)
        execution.run()
        return execution

    def close(self) -> None:
        """Accept nothing more."""
        self._closed = True


class ThreadStream:
    """Runs work in one thread of its own: submitting returns at once.

    The thread does not keep a process alive, so a rank that waits for a dead peer can still end.
    """

    def __init__(self, name: str = "neuron-stream") -> None:
        self._queue: SimpleQueue[Execution[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Execution[T]:
        """Put ``work`` at the end of the queue."""
        execution = Execution(work)
        with self._lock:
            if self._closed:
                raise DeviceError("the stream is closed")
            self._queue.put(execution)
        return execution

    def close(self) -> None:
        """Accept nothing more, and wait up to ``CLOSE_TIMEOUT_S`` seconds for what was submitted."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        while (execution := self._queue.get()) is not None:
            execution.run()
            del execution  # its result may hold a step's logits, and the next may be long in coming
