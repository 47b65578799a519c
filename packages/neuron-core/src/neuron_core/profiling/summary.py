# SPDX-License-Identifier: Apache-2.0
"""Where the time of a profiled interval went, per bucket: every instant is counted once, so the rows add up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neuron_core.errors import ConfigError
from neuron_core.profiling.chrome import SCHEDULER_PID, SECTION
from neuron_core.profiling.timeline import Kind

__all__ = ["COLUMNS", "BucketTimes", "RankSummary", "summarize"]

GAP = "gap"
COLUMNS = (Kind.SAMPLING, Kind.BUILD, Kind.SCHEDULE, Kind.OUTPUT, Kind.WAIT, GAP)
"""What a row counts besides its graph."""

_HOST = (Kind.BUILD, Kind.SCHEDULE, Kind.OUTPUT, Kind.WAIT)
"""Whose an instant without a step is if several threads do something: that of the first of these."""


@dataclass
class BucketTimes:
    """Where the time of one bucket's steps went, in microseconds."""

    bucket: str
    executions: list[float] = field(default_factory=list)
    """How long each run of the graph took."""
    spent: dict[str, float] = field(default_factory=lambda: _nothing_yet())
    """By column. ``gap`` is the host's time between two steps that no slice tells of.

    What the host does beside a running step costs nothing and is not counted.
    """

    @property
    def graph(self) -> float:
        """Time in the graph."""
        return sum(self.executions)

    @property
    def total(self) -> float:
        """All of the row."""
        return self.graph + sum(self.spent.values())

    def p99(self) -> float:
        """The execution that 99 % of all are not longer than."""
        ordered = sorted(self.executions)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    def to_json(self) -> dict[str, Any]:
        """The row in seconds."""
        count = len(self.executions)
        times = {"graph": self.graph, "mean": self.graph / count if count else 0.0, "p99": self.p99()}
        seconds = {name: value / 1e6 for name, value in {**times, **self.spent, "total": self.total}.items()}
        return {"bucket": self.bucket, "count": count, **{f"{name}_s": s for name, s in seconds.items()}}


@dataclass(frozen=True)
class RankSummary:
    """One rank's table; times in microseconds."""

    rank: int
    wall: float
    rows: tuple[BucketTimes, ...]
    dropped: int

    @property
    def idle(self) -> float:
        """What no row has: no request was there, or nothing recorded it."""
        return max(0.0, self.wall - sum(row.total for row in self.rows))

    def to_json(self) -> dict[str, Any]:
        """The table in seconds; ``total_s`` of all rows and ``idle_or_other_s`` make ``wall_s``."""
        return {
            "rank": self.rank,
            "wall_s": self.wall / 1e6,
            "idle_or_other_s": self.idle / 1e6,
            "dropped_slices": self.dropped,
            "buckets": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class _Span:
    begun: float
    ended: float
    tid: int
    kind: str
    name: str
    args: Mapping[str, Any]


def summarize(document: Mapping[str, Any]) -> tuple[RankSummary, ...]:
    """A table per rank of a trace as ``read_trace`` gives it.

    Raises ``ConfigError`` if an event or a rank has not the form that this engine writes.
    """
    try:
        return tuple(_of_rank(document, about) for about in document["otherData"][SECTION]["ranks"])
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError("TRACE", "its events", f"are damaged ({what}); profile again") from error


def _of_rank(document: Mapping[str, Any], about: Mapping[str, Any]) -> RankSummary:
    begun, ended = about["begun_us"], about["ended_us"]
    sweep = _Sweep()
    for span in _spans(document["traceEvents"], (about["pid"], SCHEDULER_PID), begun, ended):
        sweep.add(span)
    sweep.run(begun)
    rows = []
    for bucket in sorted({*sweep.spent, *sweep.executions}):
        rows.append(BucketTimes(bucket, sweep.executions.get(bucket, []), sweep.spent[bucket]))
    return RankSummary(about["rank"], ended - begun, tuple(rows), about["dropped"])


def _spans(
    events: Iterable[Mapping[str, Any]], pids: Sequence[int], begun: float, ended: float
) -> Iterable[_Span]:
    for event in events:
        if event["ph"] == "X" and event["pid"] in pids:
            first, last = max(begun, event["ts"]), min(ended, event["ts"] + event["dur"])
            if last >= first:
                yield _Span(first, last, event["tid"], event["cat"], event["name"], event["args"])


@dataclass(eq=False)
class _Sweep:
    """Goes through an interval once and gives each instant to one bucket and column."""

    spent: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(_nothing_yet))
    executions: dict[str, list[float]] = field(default_factory=dict)
    _edges: list[tuple[float, int, float, _Span]] = field(default_factory=list)
    _stacks: dict[int, list[_Span]] = field(default_factory=lambda: defaultdict(list))
    """Per thread what it is in, the innermost last."""
    _step: _Span | None = None
    _gap: dict[str, float] = field(default_factory=lambda: _nothing_yet())
    """Since the last step: the next one's bucket gets it."""

    def add(self, span: _Span) -> None:
        """Take a span in."""
        duration = span.ended - span.begun
        if duration > 0:
            self._edges += ((span.begun, 1, -duration, span), (span.ended, -1, duration, span))
        if span.kind == Kind.GRAPH:
            self.executions.setdefault(span.name, []).append(duration)

    def run(self, begun: float) -> None:
        """Fill ``spent``; a row's time in its graph is in ``executions``."""
        self._edges.sort(key=lambda edge: edge[:3])
        bucket, now = "", begun
        for at, change, _, span in self._edges:
            self._spend(at - now)
            now = at
            if change < 0:
                self._stacks[span.tid].remove(span)
                self._step = None if span is self._step else self._step
                continue
            # Nobody waited for an engine that had no request, nor before anything was recorded.
            if (span.kind == Kind.SCHEDULE and span.args.get("after_idle")) or now == self._edges[0][0]:
                self._gap[GAP] = 0.0
            self._stacks[span.tid].append(span)
            if span.kind == Kind.STEP:
                self._step, bucket = span, str(span.args["bucket"])
                self._end_gap(bucket)
        if bucket:
            self._end_gap(bucket)

    def _spend(self, duration: float) -> None:
        doing = {stack[-1].kind for stack in self._stacks.values() if stack}
        if Kind.GRAPH in doing:
            return
        if self._step is not None:
            column = Kind.SAMPLING if Kind.SAMPLING in doing else Kind.BUILD
            self.spent[str(self._step.args["bucket"])][column] += duration
        else:
            self._gap[next((kind for kind in _HOST if kind in doing), GAP)] += duration

    def _end_gap(self, bucket: str) -> None:
        row = self.spent[bucket]
        for column, duration in self._gap.items():
            row[column] += duration
        self._gap = _nothing_yet()


def _nothing_yet() -> dict[str, float]:
    return dict.fromkeys(COLUMNS, 0.0)
