# SPDX-License-Identifier: Apache-2.0
"""Timelines as one file in the Chrome trace format, which Perfetto (ui.perfetto.dev) opens.

The format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_core.errors import ConfigError
from neuron_core.profiling.timeline import Kind, Slice, Thread, Timeline

__all__ = ["SECTION", "RankTrace", "merge", "rank_trace", "read_trace", "write_trace"]

SECTION = "neuron"
"""Where in a trace's ``otherData`` the profiled intervals are."""

SCHEDULER_PID = 1
FIRST_RANK_PID = 10
FIRST_OPS_PID = 1000
_THREADS_PER_PROCESS = 1000
_GZIP_MAGIC = b"\x1f\x8b"

Event = dict[str, Any]


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded. Times are microseconds of the host's monotonic clock, which its ranks share."""

    rank: int
    begun: float
    ended: float
    events: Sequence[Event]
    dropped: int


def rank_trace(timeline: Timeline, rank: int, torch_trace: Mapping[str, Any] | None = None) -> RankTrace:
    """The events of a closed timeline, and those of torch's profiler as a process of their own.

    ``torch_trace`` is what ``export_chrome_trace`` wrote, read back.
    """
    slices = [part for part in timeline.slices if part.ended <= timeline.ended]
    rows = {thread: row for row, thread in enumerate(dict.fromkeys(part.thread for part in slices), 1)}
    events: list[Event] = []
    for thread, row in rows.items():
        events += _row_names(thread, row, rank)
    for part in slices:
        events += _slice_events(part, rank, *_place(part.thread, rows[part.thread], rank))
    if torch_trace is not None:
        names = {thread.tid: _row_name(thread) for thread in rows}
        events += _torch_events(torch_trace, rank, timeline.unix_offset, names)
    return RankTrace(rank, timeline.begun / 1e3, timeline.ended / 1e3, events, timeline.dropped)


def merge(ranks: Sequence[RankTrace], described: Mapping[str, object]) -> dict[str, Any]:
    """One document of all ranks, its times counted from the first rank's start; ``described`` goes in with them."""
    base = min(trace.begun for trace in ranks)
    events = [_shifted(event, base) for trace in ranks for event in trace.events]
    # Equal starts: the longer slice is the outer one.
    events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
    intervals = [
        {
            "rank": trace.rank,
            "pid": FIRST_RANK_PID + trace.rank,
            "begun_us": round(trace.begun - base, 3),
            "ended_us": round(trace.ended - base, 3),
            "dropped": trace.dropped,
        }
        for trace in ranks
    ]
    about = {SECTION: {**described, "ranks": intervals}}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_trace(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document``, compressed if the name ends in ``.gz``; the name appears when all of it is there.

    Raises ``OSError``.
    """
    data = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def read_trace(path: Path) -> dict[str, Any]:
    """The document in a file, compressed or not; raises ``ConfigError`` if it is not a trace of this engine."""
    hint = "is not a trace of this engine; name a .trace.json.gz file that /stop_profile wrote"
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
        document = json.loads(data)
        document["traceEvents"], document["otherData"][SECTION]["ranks"]
    except OSError as error:
        raise ConfigError("TRACE", str(path), f"cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError, EOFError, RecursionError, zlib.error) as error:
        raise ConfigError("TRACE", str(path), hint) from error
    return dict(document)


def _place(thread: Thread, row: int, rank: int) -> tuple[int, int]:
    pid = FIRST_RANK_PID + rank if thread.pid == os.getpid() else SCHEDULER_PID
    # Perfetto knows a thread by its id alone, so that no two processes may use the same.
    return pid, pid * _THREADS_PER_PROCESS + row


def _row_names(thread: Thread, row: int, rank: int) -> list[Event]:
    pid, tid = _place(thread, row, rank)
    process = f"rank {rank}" if pid != SCHEDULER_PID else "scheduler"
    return [_named("process_name", process, pid, tid), _named("thread_name", _row_name(thread), pid, tid)]


def _row_name(thread: Thread) -> str:
    return {"MainThread": "engine thread", "neuron-stream": "stream"}.get(thread.name, thread.name)


def _named(what: str, name: str, pid: int, tid: int) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice_events(part: Slice, rank: int, pid: int, tid: int) -> Iterable[Event]:
    begun, duration = part.begun / 1e3, (part.ended - part.begun) / 1e3
    place = {"pid": pid, "tid": tid, "ts": begun}
    yield {**place, "name": part.name, "cat": part.kind.value, "ph": "X", "dur": duration, "args": part.args}
    step = part.args.get("step")
    if isinstance(step, int) and part.kind in (Kind.SUBMIT, Kind.STEP):
        flow = {**place, "name": "submitted", "cat": "flow", "id": (rank << 32) + step}
        yield {**flow, "ph": "s"} if part.kind is Kind.SUBMIT else {**flow, "ph": "f", "bp": "e"}


def _torch_events(
    document: Mapping[str, Any], rank: int, unix_offset: int, names: Mapping[int, str]
) -> list[Event]:
    """Events of torch's own rows, moved to this host's monotonic clock and to a process of their own."""
    base = (int(document.get("baseTimeNanoseconds", 0)) - unix_offset) / 1e3
    pid, own = FIRST_OPS_PID + rank, os.getpid()
    rows: dict[int, int] = {}
    events = [_named("process_name", f"rank {rank}: torch ops", pid, pid * _THREADS_PER_PROCESS)]
    for event in document["traceEvents"]:
        if event.get("ph") != "X" or event.get("pid") != own:
            continue
        row = rows.setdefault(event["tid"], pid * _THREADS_PER_PROCESS + len(rows) + 1)
        events.append({**event, "pid": pid, "tid": row, "ts": float(event["ts"]) + base})
    _cut(events)
    for thread, row in rows.items():
        events.append(_named("thread_name", names.get(thread, f"thread {thread}"), pid, row))
    return events


def _cut(events: list[Event]) -> None:
    """Let no slice end after the one it began in: torch rounds, and Perfetto drops what does not nest."""
    open_until: dict[int, list[float]] = {}
    slices = (event for event in events if event["ph"] == "X")
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        ends = open_until.setdefault(event["tid"], [])
        event["ts"] = round(event["ts"], 3)
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        ended = round(event["ts"] + event["dur"], 3)
        ends.append(min(ended, ends[-1]) if ends else ended)
        event["dur"] = round(ends[-1] - event["ts"], 3)


def _shifted(event: Event, base: float) -> Event:
    return event if "ts" not in event else {**event, "ts": round(event["ts"] - base, 3)}
