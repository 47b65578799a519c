# SPDX-License-Identifier: Apache-2.0
"""Compares two captures, or two against a third of higher precision, module by module in the order they ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import StepRecord
from neuron_accuracy.compare.alignment import Alignment, Span
from neuron_accuracy.compare.filters import lost_modules
from neuron_accuracy.compare.limits import Limits
from neuron_accuracy.compare.metrics import coarser
from neuron_accuracy.compare.origin import judge
from neuron_accuracy.compare.requests import pair_requests
from neuron_accuracy.compare.score import Score, score
from neuron_accuracy.compare.tally import Tally
from neuron_accuracy.compare.views import View, ViewReader, views_of
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.findings import Finding, Level, Outcome, Severity
from neuron_accuracy.layout import Rows

__all__ = ["CHUNK_ELEMENTS", "Progress", "compare_captures"]

CHUNK_ELEMENTS = 1 << 18
"""Elements of a tensor that are held at a time, in float64 and in each of a dozen intermediate results."""

Progress = Callable[[int, int, str], None]
"""Called with how many tensors were compared, of how many, and the name of the next."""

_SIDES = ("test", "reference", "baseline")

_UNTOLD = ("unknown", "none", 0)
"""What a run says that does not know, or has none."""


def compare_captures(
    test: Capture | Path,
    reference: Capture | Path,
    baseline: Capture | Path | None = None,
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
    revisions_may_differ: bool = False,
) -> Outcome:
    """Find the first module, in the order they ran, where the test parts from the reference.

    With a ``baseline`` of higher precision (the reference's model in float32) the reference is in the test's dtype,
    and the test's errors are held against the reference's by :class:`Gates`; without, differences by :class:`TwoWay`
    limits. Raises ``CaptureError`` if the captures are not of one model or cannot be read, ``LayoutError`` if what
    ranks hold does not make one tensor. Weights of another revision are a note instead if ``revisions_may_differ``, as
    where two checkpoints are compared. ``data`` is described in docs/accuracy-captures.md.
    """
    captures = [_opened(item) for item in (test, reference, baseline) if item is not None]
    others = [
        note
        for side, other in zip(_SIDES[1:], captures[1:], strict=False)
        for note in _check_same_model(captures[0], other, side, revisions_may_differ)
    ]
    comparison = _Comparison(captures, limits or Limits())
    scores = comparison.run(progress)
    findings, data = judge(scores, comparison.pairs, comparison.limits)
    kind = "three-way" if len(captures) == 3 else "two-way"
    return Outcome(
        "compare",
        f"Tensors, {kind}",
        _described(captures[0]),
        " and ".join(_described(item) for item in captures[1:]),
        [*comparison.findings, *findings, *others, *comparison.notes],
        {"mode": kind, "limits": comparison.limits.to_json(), **data, "unpaired": comparison.unpaired},
    )


@dataclass(frozen=True)
class _Row:
    """A tensor that all captures have."""

    name: str
    readers: tuple[ViewReader, ...]


class _Comparison:
    def __init__(self, captures: Sequence[Capture], limits: Limits) -> None:
        self.captures = captures
        self.limits = limits
        self.pairs, self.findings = pair_requests(captures[0], captures[1])
        self.notes: list[Finding] = []
        self.unpaired: dict[str, list[str]] = {}
        self._alignment = self._align()

    def run(self, progress: Progress | None) -> list[Score]:
        rows = self._rows()
        scores = []
        for count, row in enumerate(rows):
            if progress is not None:
                progress(count, len(rows), row.name)
            found = self._score(row)
            if found is not None:
                scores.append(found)
        if not scores and not any(item.severity is Severity.FAULT for item in self.findings):
            raise CaptureError(
                f"{self.captures[0].folder} and {self.captures[1].folder} have no row of a tensor in common: "
                "capture the same modules and positions in both"
            )
        return scores

    def _align(self) -> Alignment:
        requests = [[pair.test, pair.reference] for pair in self.pairs]
        positions: list[Sequence[int]] = [pair.positions for pair in self.pairs]
        if len(self.captures) == 3:
            others, findings = pair_requests(self.captures[0], self.captures[2], "baseline")
            self.findings += [item for item in findings if item not in self.findings]
            by_test = {pair.test.key: pair for pair in others}
            held = [pair for pair in self.pairs if pair.test.key in by_test]
            self.pairs = held
            requests, positions = [], []
            for pair in held:
                other = by_test[pair.test.key]
                requests.append([pair.test, pair.reference, other.reference])
                shared = set(other.positions)
                positions.append([at for at in pair.positions if at in shared])
        return Alignment(requests, positions)

    def _rows(self) -> list[_Row]:
        views = [views_of(capture) for capture in self.captures]
        shared = [name for name in views[0] if all(name in other for other in views[1:])]
        if not shared:
            some = [next(iter(held), "nothing") for held in views]
            raise CaptureError(
                f"the captures have no tensor of one name: {self.captures[0].folder} has {some[0]}, "
                f"{self.captures[1].folder} has {some[1]}; capture the same modules, or name them in RunRecord.names"
            )
        sliced = {views[0][name].source.rpartition(":")[0] for name in shared if views[0][name].part}
        shared = [name for name in shared if views[0][name].part or views[0][name].source not in sliced]
        for side, capture, held in zip(_SIDES, self.captures, views, strict=False):
            alone = self._note_unpaired(side, held, shared)
            for other, lacking in zip(_SIDES, self.captures, strict=False):
                if lost := lost_modules(alone, capture, lacking):
                    shown = ", ".join(lost[:3]) + (", …" if len(lost) > 3 else "")
                    detail = f"the {other} lacks {len(lost)} modules that the {side} has and it was asked for: {shown}"
                    self._fault(lost[0], "missing module", detail)
        return [
            _Row(name, tuple(ViewReader(c, held[name]) for c, held in zip(self.captures, views, strict=True)))
            for name in shared
        ]

    def _note_unpaired(self, side: str, held: dict[str, View], shared: Sequence[str]) -> list[View]:
        used = {(held[name].module, held[name].tensor) for name in shared}
        alone = [
            name for name, view in held.items() if (view.module, view.tensor) not in used and not view.part
        ]
        self.unpaired[side] = alone
        if alone:
            shown = ", ".join(alone[:3]) + (", …" if len(alone) > 3 else "")
            detail = f"{len(alone)} tensors only the {side} has were not compared: {shown}"
            self.notes.append(Finding(Level.TENSOR, "not compared", side, detail, Severity.NOTE))
        return [held[name] for name in alone]

    def _score(self, row: _Row) -> Score | None:
        kinds = tuple(reader.view.layout.rows for reader in row.readers)
        tally: Tally | None = None
        dtypes: tuple[torch.dtype, ...] = ()
        unrowed = Rows.NONE in kinds
        pieces = self._unrowed(row, kinds) if unrowed else self._rowed(row, self._alignment.spans(kinds))
        for tensors, pairs, positions in _batched(pieces):
            if not any(tensor.shape[1] for tensor in tensors):
                self._note(row.name, "it has no features")
                return None
            if tally is None:
                dtypes = tuple(tensor.dtype for tensor in tensors)
                tally = self._tally(row, tensors)
            tensors = list(tensors)
            if tally.features and any(tensor.shape[1] != tally.features for tensor in tensors):
                tensors = _without_padding(tensors, tally.features)
            if any(tensor.shape[1] != tally.features for tensor in tensors):
                self._fault(row.name, "shapes differ", _shapes(row, tensors))
                return None
            baseline = tensors[2] if len(tensors) == 3 else None
            tally.add(tensors[0], tensors[1], baseline, pairs, positions)
        if tally is None:
            self._note(row.name, "no position has a row in every capture")
            return None
        sources = tuple(reader.view.source for reader in row.readers)
        requests = [pair.test.request for pair in self.pairs]
        return score(row.name, tally, dtypes, sources, self._coarsest(row), self.limits, requests)

    def _coarsest(self, row: _Row) -> torch.dtype:
        """Of the dtypes that test and reference hold a tensor in and, if it is no integer, compute in."""
        dtypes = [_real(reader.view.dtype) for reader in row.readers[:2]]
        found = coarser(*dtypes)
        if not found.is_floating_point:
            return found
        for capture in self.captures[:2]:
            name = capture.run.info.dtype.removeprefix("torch.")
            own = getattr(torch, name, None)
            if isinstance(own, torch.dtype):
                found = coarser(found, own)
        return found

    def _tally(self, row: _Row, tensors: Sequence[Tensor]) -> Tally:
        heads = next((reader.view.heads for reader in row.readers if reader.view.heads), None)
        features = min(tensor.shape[1] for tensor in tensors)
        target = self._coarsest(row)
        if heads and features % heads:
            heads = None
        return Tally(features, heads, target if target.is_floating_point else None)

    def _rowed(self, row: _Row, spans: Sequence[Span]) -> Iterator[_Piece]:
        for span in spans:
            steps = [
                (dp, capture.steps(dp)[index])
                for capture, (dp, index) in zip(self.captures, span.steps, strict=True)
            ]
            held = [reader.holds(dp, step) for reader, (dp, step) in zip(row.readers, steps, strict=True)]
            if not all(held):
                self._missing(row, held, [step for _, step in steps])
                continue
            count = self._checked(row, steps)
            for piece in span.pieces(count):
                tensors = [
                    _taken(reader, dp, step, index, count)
                    for reader, (dp, step), index in zip(row.readers, steps, piece.rows, strict=True)
                ]
                yield tensors, piece.pairs, piece.positions

    def _unrowed(self, row: _Row, kinds: Sequence[Rows]) -> Iterator[_Piece]:
        if set(kinds) != {Rows.NONE}:
            named = ", ".join(f"{side} {kind}" for side, kind in zip(_SIDES, kinds, strict=False))
            self._fault(row.name, "layouts differ", f"its rows are {named}; declare the same")
            return
        held = [
            [(dp, step) for dp in capture.replicas for step in capture.steps(dp) if reader.holds(dp, step)]
            for capture, reader in zip(self.captures, row.readers, strict=True)
        ]
        if len({len(steps) for steps in held}) > 1:
            counts = ", ".join(f"{side} {len(steps)}" for side, steps in zip(_SIDES, held, strict=False))
            self._fault(row.name, "missing step", f"steps that have it: {counts}")
        for steps in zip(*held, strict=False):
            self._checked(row, steps)
            tensors = [
                reader.everything(dp, step) for reader, (dp, step) in zip(row.readers, steps, strict=True)
            ]
            zero = torch.zeros(1, dtype=torch.int64)
            yield tensors, zero, zero

    def _checked(self, row: _Row, steps: Sequence[tuple[int, StepRecord]]) -> int:
        """How many rows of a step's tensor are read at a time, once its files were checked and its replicas agree."""
        each = list(zip(row.readers, steps, strict=True))
        count = max(1, CHUNK_ELEMENTS // max(_size(reader.shape(dp, step)) for reader, (dp, step) in each))
        for reader, (dp, step) in each:
            for detail in reader.check(dp, step, count):
                self._fault(reader.view.source, "replicas differ", detail)
        return count

    def _missing(self, row: _Row, held: Sequence[bool], steps: Sequence[StepRecord]) -> None:
        if not any(held):
            return
        # A run need not make a row of a request in a chunk of its prompt, unless the others do it there as well.
        alike = all(reader.view.layout.rows is Rows.REQUESTS for reader in row.readers)
        for side, has, step, reader in zip(_SIDES, held, steps, row.readers, strict=False):
            if not has:
                due = alike or reader.view.layout.rows is Rows.TOKENS or step.phase == "decode"
                severity = Severity.FAULT if due else Severity.NOTE
                source = reader.view.source
                detail = (
                    f"step {step.number} of the {side} has no {source}, as the other has for its positions"
                )
                found = Finding(Level.INPUT, "missing step", row.name, detail, severity)
                into = self.findings if due else self.notes
                if not any(item.where == row.name and item.kind == found.kind for item in into):
                    into.append(found)

    def _note(self, where: str, detail: str) -> None:
        self.notes.append(Finding(Level.TENSOR, "not compared", where, detail, Severity.NOTE))

    def _fault(self, where: str, kind: str, detail: str) -> None:
        if not any(item.where == where and item.kind == kind for item in self.findings):
            self.findings.append(Finding(Level.INPUT, kind, where, detail))


_Piece = tuple[list[Tensor], Tensor, Tensor]


def _batched(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Pieces of equal dtypes and widths together, up to a chunk: a decode step is one row per request."""
    held: list[_Piece] = []
    for piece in pieces:
        alike = not held or all(
            a.dtype == b.dtype and a.shape[1] == b.shape[1] for a, b in zip(held[0][0], piece[0], strict=True)
        )
        size = sum(item[0][0].numel() for item in held) + piece[0][0].numel()
        if held and (not alike or size > CHUNK_ELEMENTS):
            yield _joined(held)
            held = []
        held.append(piece)
    if held:
        yield _joined(held)


def _joined(pieces: list[_Piece]) -> _Piece:
    tensors = [torch.cat(parts) for parts in zip(*(piece[0] for piece in pieces), strict=True)]
    return tensors, torch.cat([piece[1] for piece in pieces]), torch.cat([piece[2] for piece in pieces])


def _taken(reader: ViewReader, dp: int, step: Any, index: Tensor, count: int) -> Tensor:
    low, high = int(index.min()), int(index.max()) + 1
    if high - low <= 2 * count:
        rows = reader.rows(dp, step, low, high)
        return rows if high - low == len(index) and bool((index.diff() == 1).all()) else rows[index - low]
    return torch.cat([reader.rows(dp, step, at, at + 1) for at in index.tolist()])


def _without_padding(tensors: Sequence[Tensor], features: int) -> list[Tensor]:
    """Columns beyond the narrowest, if all they hold is zero or minus infinity."""
    cut = []
    for tensor in tensors:
        spare = tensor[:, features:]
        padding = bool(((spare == 0) | (spare == -torch.inf)).all())
        cut.append(tensor[:, :features] if padding else tensor)
    return cut


def _shapes(row: _Row, tensors: Sequence[Tensor]) -> str:
    parts = [
        f"{reader.view.source} has {tensor.shape[1]} features in the {side}"
        for side, reader, tensor in zip(_SIDES, row.readers, tensors, strict=False)
    ]
    return ", ".join(parts)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape[1:]:
        size *= extent
    return max(1, size)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _opened(item: Capture | Path) -> Capture:
    return item if isinstance(item, Capture) else Capture(item)


def _check_same_model(
    test: Capture, other: Capture, side: str, revisions_may_differ: bool
) -> Iterator[Finding]:
    mine, its = test.run.info, other.run.info
    for what, left, right in (
        ("vocabulary size", mine.vocab_size, its.vocab_size),
        ("tokenizer", mine.tokenizer, its.tokenizer),
        ("revision of the weights", mine.revision, its.revision),
    ):
        if left == right or left in _UNTOLD or right in _UNTOLD:
            continue
        if what != "revision of the weights" or not revisions_may_differ:
            raise CaptureError(
                f"the captures are of different models: {what} {left!r} of {mine.model} in {test.folder}, {right!r} "
                f"of {its.model} in the {side} {other.folder}; compare runs of one model"
            )
        detail = f"the test has revision {str(left)[:12]} and the {side} {str(right)[:12]}"
        yield Finding(Level.INPUT, "other weights", _described(test), detail, Severity.NOTE)


def _described(capture: Capture) -> str:
    info = capture.run.info
    parallel = "".join(f" {axis}={degree}" for axis, degree in info.parallel.items())
    return f"{info.kind} {info.model} {info.dtype}{parallel}"
