# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation: many buckets, in worker processes, none of which can stop the others."""

from __future__ import annotations

import multiprocessing
import resource
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from neuron_core.errors import NeuronError

__all__ = ["AotResult", "AotTask", "AotWorker", "Outcome", "compile_ahead"]


@dataclass(frozen=True)
class AotTask:
    """A bucket to compile for a rank; the largest ``cost`` starts first, so that the longest is not the last."""

    bucket: str
    rank: int
    cost: int


@dataclass(frozen=True)
class Outcome:
    """What a worker did for a task: distinct graphs captured, compiled, and found in the store.

    ``graphs`` are their key digests; ``advice`` says why a step was left out, such as a missing vendor compiler.
    """

    captured: int
    compiled: int
    loaded: int
    graphs: tuple[str, ...]
    advice: str = ""


@dataclass(frozen=True)
class AotResult:
    """How a task ended. ``peak_bytes`` is the largest resident memory its worker had by then.

    ``error`` is empty on success; ``log`` holds the traceback of a failure.
    """

    task: AotTask
    outcome: Outcome | None
    seconds: float
    peak_bytes: int
    error: str = ""
    log: Path | None = None


class AotWorker(Protocol):
    """Lives in a worker process and compiles one bucket after another."""

    def compile(self, task: AotTask) -> Outcome:
        """Compile a bucket; raises ``NeuronError`` when it cannot be."""
        ...


def compile_ahead(
    make_worker: Callable[[], AotWorker],
    tasks: Sequence[AotTask],
    *,
    jobs: int,
    logs: Path,
    on_result: Callable[[AotResult], None] = lambda result: None,
) -> list[AotResult]:
    """Compile ``tasks`` in ``jobs`` processes; returns a result for each, in the order of ``tasks``.

    ``make_worker`` is called once per process, so it must be picklable (a module-level function, or a
    ``functools.partial`` of one). A failing task is reported and the others continue, also when it takes its
    process with it: what that process pool had not finished is tried again, each task in a process of its own.
    """
    ordered = sorted(tasks, key=lambda task: -task.cost)
    results: dict[AotTask, AotResult] = {}

    def done(result: AotResult) -> None:
        results[result.task] = result
        on_result(result)

    _run_pool(make_worker, ordered, min(jobs, len(ordered)), logs, done)
    for task in ordered:
        if task not in results:
            _run_pool(make_worker, [task], 1, logs, done)
        if task not in results:
            done(_killed(task, jobs, logs))
    return [results[task] for task in tasks]


def _run_pool(
    make_worker: Callable[[], AotWorker],
    tasks: Sequence[AotTask],
    jobs: int,
    logs: Path,
    done: Callable[[AotResult], None],
) -> None:
    """Hand every finished task to ``done``; a broken pool leaves the others out."""
    if not tasks:
        return
    # Not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _start, (make_worker,)) as pool:
        futures: list[Future[AotResult]] = []
        try:
            futures += (pool.submit(_compile, task, logs) for task in tasks)
            for future in as_completed(futures):
                done(future.result())
        except BrokenProcessPool:
            return


_worker: AotWorker | NeuronError | None = None


def _start(make_worker: Callable[[], AotWorker]) -> None:
    """In a worker process: an error of the set-up is kept, so that each task can report it."""
    global _worker
    try:
        _worker = make_worker()
    except NeuronError as error:
        _worker = error


def _compile(task: AotTask, logs: Path) -> AotResult:
    begun = time.perf_counter()
    outcome, message, log = None, "", None
    try:
        if _worker is None or isinstance(_worker, NeuronError):
            raise _worker or NeuronError("the worker process was not set up")
        outcome = _worker.compile(task)
    except Exception as error:  # whatever a bucket does, the others continue
        message = str(error) if isinstance(error, NeuronError) else f"{type(error).__name__}: {error}"
        log = _write_log(task, logs, traceback.format_exc())
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return AotResult(task, outcome, time.perf_counter() - begun, peak_bytes, message, log)


def _killed(task: AotTask, jobs: int, logs: Path) -> AotResult:
    message = (
        f"the compiling process was killed; most often the host ran out of memory: use fewer than {jobs} jobs, "
        "or a host with more"
    )
    return AotResult(task, None, 0.0, 0, message, _write_log(task, logs, message))


def _write_log(task: AotTask, logs: Path, text: str) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"rank{task.rank}-{task.bucket}.log"
    path.write_text(text if text.endswith("\n") else text + "\n")
    return path
