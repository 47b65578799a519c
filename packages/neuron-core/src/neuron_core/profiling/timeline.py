# SPDX-License-Identifier: Apache-2.0
"""What the threads of a rank do, and when: recorded while a profile runs, for one look at a variable when none does."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, cast

__all__ = ["MAX_SLICES", "Kind", "Slice", "Thread", "Timeline", "record", "recording", "timed"]

MAX_SLICES = 2_000_000
"""Most slices of one timeline, some 600 MB of memory; later ones are counted and not kept."""

Function = TypeVar("Function", bound=Callable[..., Any])
Naming = Callable[..., str]
Describing = Callable[..., Mapping[str, object]]


class Kind(StrEnum):
    """What a slice of time was spent on."""

    SCHEDULE = "schedule"
    BUILD = "build"
    SUBMIT = "submit"
    STEP = "step"
    """A whole step on the stream; the graph and sampling on the host lie in it."""
    GRAPH = "graph"
    SAMPLING = "sampling"
    WAIT = "wait"
    OUTPUT = "output"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread of a process on this host, by the system's numbers."""

    pid: int
    tid: int
    name: str

    @classmethod
    def current(cls) -> Thread:
        """The calling one."""
        thread = threading.current_thread()
        return cls(os.getpid(), thread.native_id or 0, thread.name)


@dataclass(frozen=True, slots=True)
class Slice:
    """One piece of work on one thread, from ``begun`` to ``ended`` (nanoseconds of ``time.perf_counter_ns``).

    A slice of kind ``SUBMIT`` and the one of kind ``STEP`` that runs what it submitted have the same ``step`` in
    ``args``.
    """

    name: str
    kind: Kind
    begun: int
    ended: int
    thread: Thread
    args: Mapping[str, object]


@dataclass(eq=False)
class Timeline:
    """The slices of one rank while it is recorded; any thread may add."""

    begun: int = field(default_factory=time.perf_counter_ns)
    ended: int = 0
    unix_offset: int = field(default_factory=lambda: time.time_ns() - time.perf_counter_ns())
    """Nanoseconds to add to a time of this timeline for one since 1970."""
    slices: list[Slice] = field(default_factory=list)
    dropped: int = 0
    """Slices not kept because there were ``MAX_SLICES``."""

    def add(
        self,
        name: str,
        kind: Kind,
        begun: int,
        ended: int,
        args: Mapping[str, object] | None = None,
        thread: Thread | None = None,
    ) -> None:
        """Add a slice, of the calling thread unless another is given."""
        if len(self.slices) >= MAX_SLICES:
            self.dropped += 1
            return
        self.slices.append(Slice(name, kind, begun, ended, thread or Thread.current(), args or {}))

    def close(self) -> None:
        """Set the end; a slice that ends later is left out by what reads the timeline."""
        self.ended = time.perf_counter_ns()


class _Recorder:
    """The timeline of this process, where one is recorded."""

    __slots__ = ("timeline",)

    def __init__(self) -> None:
        self.timeline: Timeline | None = None


_recorder = _Recorder()


def recording() -> Timeline | None:
    """The timeline that is being recorded in this process, or None."""
    return _recorder.timeline


def record(timeline: Timeline | None) -> None:
    """Record into ``timeline`` from now on; None ends it."""
    _recorder.timeline = timeline


def timed(
    name: str | Naming, kind: Kind, describe: Describing | None = None
) -> Callable[[Function], Function]:
    """A decorator: each call is a slice while a timeline is recorded, and costs one look at a variable otherwise.

    ``name`` may be computed from the call's arguments, and ``describe`` gives the slice's ``args`` from them.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            timeline = _recorder.timeline
            if timeline is None:
                return function(*args, **kwargs)
            begun = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                ended = time.perf_counter_ns()
                called = name if isinstance(name, str) else name(*args, **kwargs)
                details = describe(*args, **kwargs) if describe is not None else None
                timeline.add(called, kind, begun, ended, details)

        return cast(Function, run)

    return decorate
