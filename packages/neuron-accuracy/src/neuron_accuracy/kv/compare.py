# SPDX-License-Identifier: Apache-2.0
"""Holds the caches of one capture against those of another, a layer of a request at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.findings import Finding, Level, Outcome, Severity
from neuron_accuracy.kv.causes import Cause, Sight, ranges
from neuron_accuracy.kv.contiguous import freed_positions
from neuron_accuracy.kv.figures import Figures, measure
from neuron_accuracy.kv.findings import findings_of
from neuron_accuracy.kv.judge import Judge
from neuron_accuracy.kv.limits import (
    BASELINE_RATIO,
    POSITION_FACTOR,
    REFERENCE_FACTOR,
    Limits,
    limits_for,
)
from neuron_accuracy.kv.requests import Cache, Layer, Pair, caches_of, pair_up
from neuron_accuracy.kv.tables import PARTS, RequestTable, Tables
from neuron_accuracy.logits.same import label

__all__ = ["Progress", "compare_caches"]

Progress = Callable[[int, int], None]
"""Called with how many of how many layers of requests are done."""

_SPAN = 16
_UNTOLD = {"unknown", "none", 0}


def compare_caches(
    test: Capture,
    reference: Capture,
    baseline: Capture | None = None,
    *,
    progress: Progress = lambda done, total: None,
) -> Outcome:
    """Compare the KV caches of two captures of one model; see ``docs/accuracy-kv.md`` for the outcome's data.

    With a ``baseline`` of higher precision the test is held against it, and may be ``BASELINE_RATIO`` times as far from
    it as the reference is. Raises ``CaptureError`` when a capture has no caches or cannot be read, ``LayoutError`` when
    ranks do not make a cache or the models differ in layers, heads or head size.
    """
    notes = _check_same_tokens(test, reference)
    tests, references = caches_of(test), caches_of(reference)
    pairs, left, unused = pair_up(tests, references, [] if baseline is None else caches_of(baseline))
    findings = _unpaired(left, unused)
    findings += [item for pair in pairs for item in (*_shortened(pair), *_given_back(pair))]
    if not pairs:
        return _outcome(test, reference, findings + notes, {})
    comparison = _Comparison(pairs, progress)
    comparison.run()
    findings += comparison.unseen()
    findings += findings_of(comparison.judges, comparison.num_layers, comparison.num_heads)
    return _outcome(test, reference, findings + notes, comparison.data())


class _Comparison:
    def __init__(self, pairs: Sequence[Pair], progress: Progress) -> None:
        record = pairs[0].test.record
        self.pairs, self.progress = pairs, progress
        self.judges = [Judge(pair) for pair in pairs]
        self.num_layers, self.num_heads = record.num_layers, record.num_heads
        self.tables = Tables(record.num_layers, record.num_heads, max(pair.length for pair in pairs))
        self.requests = [RequestTable(record.num_layers, pair.length, _span(pair)) for pair in pairs]
        self.limits = Limits(0.0, 0.0)
        self.dtypes: set[str] = set()

    def run(self) -> None:
        total = self.num_layers * len(self.pairs)
        for layer in range(self.num_layers):
            for index in range(len(self.pairs)):
                self._layer(index, layer)
                self.progress(layer * len(self.pairs) + index + 1, total)

    def unseen(self) -> list[Finding]:
        """Requests of which no position of any layer could be compared: they did not pass, nothing looked at them."""
        found = []
        for pair, table in zip(self.pairs, self.requests, strict=True):
            if not table.seen:
                detail = (
                    f"none of {pair.length} positions is held by all sides, in blocks that were not given back, and "
                    "finite; captures taken before blocks are given back, or of fewer tokens, have some"
                )
                found.append(Finding(Level.INPUT, "nothing compared", _where(pair), detail))
        return found

    def _layer(self, index: int, layer: int) -> None:
        pair, judge = self.pairs[index], self.judges[index]
        ours, theirs = pair.test.layer(layer), pair.reference.layer(layer)
        truth = theirs if pair.baseline is None else pair.baseline.layer(layer)
        limits = self._limits(pair, ours, theirs)
        judge.causes += _disagreeing(pair, ours, theirs, layer)
        sights = {}
        for part in PARTS:
            tensors = [getattr(held, part)[:, : pair.length] for held in (ours, theirs, truth)]
            sight = self._sight(judge, part, layer, tensors, limits)
            self.requests[index].add(part, layer, sight)
            if sight is not None:
                self.tables.add(sight)
                sights[part] = sight
        judge.look(layer, sights)

    def _limits(self, pair: Pair, ours: Layer, theirs: Layer) -> Limits:
        infos = (pair.test.capture.run.info, pair.reference.capture.run.info)
        dtypes = {ours.dtype, theirs.dtype, *(info.dtype for info in infos)}
        limits = limits_for(dtypes)
        self.dtypes |= dtypes
        self.limits = max(self.limits, limits, key=lambda item: item.head)
        return limits

    def _sight(
        self, judge: Judge, part: str, layer: int, tensors: Sequence[torch.Tensor], limits: Limits
    ) -> Sight | None:
        """What can be compared of a part; what is not finite becomes a cause."""
        pair = judge.pair
        usable = _held_by_all(pair)
        for (side, cache), tensor in zip(pair.sides.items(), tensors, strict=False):
            wrong = ~tensor.isfinite().all(dim=-1) & ~freed_positions(cache.record)[: pair.length]
            if wrong.any():
                judge.causes.append(_not_finite(part, layer, side, wrong))
                usable &= ~wrong.any(dim=0)
        if not usable.any():
            return None
        ours, theirs, truth = (tensor[:, usable] for tensor in tensors)
        positions = usable.nonzero().flatten()
        figures = measure(ours, truth)
        head = torch.full((self.num_heads,), limits.head, dtype=torch.float64)
        position = torch.full_like(figures.by_position, limits.position)
        if pair.baseline is not None:
            of_reference = measure(theirs, truth)
            judge.causes += _reference_off(part, layer, of_reference, limits)
            head, position = _from_baseline(of_reference, limits)
        return Sight(part, layer, ours, truth, positions, figures, head, position, limits)

    def data(self) -> dict[str, Any]:
        dtypes = sorted({dtype.removeprefix("torch.") for dtype in self.dtypes})
        both = zip(self.judges, self.requests, strict=True)
        return {
            "limits": {
                "dtypes": ", ".join(dtypes),
                "relative_l2_of_a_head": self.limits.head,
                "relative_l2_of_a_position": self.limits.position,
            },
            "requests": [_row(judge, table) for judge, table in both],
            **self.tables.data(self.limits),
            "prompts": [
                {"title": f"Request {pair.request}", "heat_maps": table.heat_maps()}
                for pair, table in zip(self.pairs, self.requests, strict=True)
            ],
        }


def _span(pair: Pair) -> int:
    """Positions of a block, or of what stands for one where neither side has several."""
    spans = [cache.record.block_size * cache.record.dcp for cache in (pair.test, pair.reference)]
    return min(spans) if min(spans) < pair.length else _SPAN


def _row(judge: Judge, table: RequestTable) -> dict[str, Any]:
    pair = judge.pair
    test = pair.test.record
    worst = {part: max((x for x in table.worst[part] if x == x), default=float("nan")) for part in PARTS}
    return {
        "request": test.request,
        "held_against": pair.reference.record.request,
        "positions": pair.length,
        "cached": test.num_cached,
        "freed_blocks": sum(test.freed),
        "agrees": not judge.causes and not judge.overwritten,
        "first_layer": judge.first_layer,
        "worst_keys": worst["keys"],
        "worst_values": worst["values"],
    }


def _from_baseline(of_reference: Figures, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """Limits of heads and positions: multiples of the reference's own errors, never below those without a baseline.

    How a rounding grows in a few tokens is chance, in the reference as in the test: in a text of some tens of tokens a
    correct run of a real model in bfloat16 has been twice as far as the reference.
    """
    head = (BASELINE_RATIO * of_reference.relative_l2).clamp_min(limits.head)
    errors = of_reference.by_position
    usual = torch.maximum(errors, errors.mean(dim=1, keepdim=True))
    return head, (POSITION_FACTOR * usual).clamp_min(limits.position)


def _reference_off(part: str, layer: int, figures: Figures, limits: Limits) -> list[Cause]:
    limit = REFERENCE_FACTOR * limits.head
    off = (figures.relative_l2 > limit).nonzero().flatten().tolist()
    if not off:
        return []
    worst = float(figures.relative_l2.max())
    what = f"the reference itself is {worst:.3g} from the baseline, limit {limit:.3g}: it is no reference"
    return [Cause("reference off", part, tuple(off), what, layer, figures={"relative_l2": worst})]


def _not_finite(part: str, layer: int, side: str, wrong: torch.Tensor) -> Cause:
    heads = tuple(wrong.any(dim=1).nonzero().flatten().tolist())
    positions = tuple(wrong.any(dim=0).nonzero().flatten().tolist())
    what = f"{part} not finite in the {side}, although their blocks were not given back"
    return Cause("not finite", part, heads, what, layer, positions)


def _disagreeing(pair: Pair, ours: Layer, theirs: Layer, layer: int) -> list[Cause]:
    causes = []
    for side, cache, held in (("test", pair.test, ours), ("reference", pair.reference, theirs)):
        for rank, other, part in held.other_scales:
            what = f"ranks {other} and {rank} of the {side} should have the same scales of {part} and do not"
            causes.append(Cause("ranks disagree", part, _heads_of(cache, rank), what, layer))
        for rank, other, position in held.disagreeing:
            heads = _heads_of(cache, rank)
            what = (
                f"ranks {other} and {rank} of the {side} should hold the same and do not, "
                f"from position {position} on"
            )
            causes += [Cause("ranks disagree", part, heads, what, layer) for part in PARTS]
    return causes


def _heads_of(cache: Cache, rank: int) -> tuple[int, ...]:
    record = cache.record
    local = record.num_heads * record.replicas // cache.capture.run.ranks
    group = rank // record.replicas
    return tuple(range(group * local, (group + 1) * local))


def _where(pair: Pair) -> str:
    return f"request {pair.request}, held against {pair.reference.record.request}"


def _held_by_all(pair: Pair) -> torch.Tensor:
    """Positions whose blocks no side gave back, bool ``[pair.length]``."""
    held = torch.ones(pair.length, dtype=torch.bool)
    for cache in pair.sides.values():
        held &= ~freed_positions(cache.record)[: pair.length]
    return held


def _unpaired(left: Sequence[Cache], unused: Sequence[Cache]) -> list[Finding]:
    found = []
    for cache, side, other in [(c, "test", "reference") for c in left] + [
        (c, "reference", "test") for c in unused
    ]:
        detail = f"the {other} has no cache that begins with the same token ({cache.record.token_ids[0]}) and is free"
        where = f"request {cache.record.request} of the {side}"
        found.append(Finding(Level.INPUT, "request without a pair", where, detail))
    return found


def _shortened(pair: Pair) -> list[Finding]:
    """What of a pair cannot be compared for want of tokens.

    That a side ends earlier is a note, unless more positions are missing for it than are compared. Only positions that
    are still held count: a window that slid on may leave nothing of what the shorter side has.
    """
    tokens = {side: cache.record.token_ids for side, cache in pair.sides.items()}
    longest, n = max(map(len, tokens.values())), pair.length
    if n == longest:
        return []
    compared = int(_held_by_all(pair).sum())
    missing = max(int((~freed_positions(cache.record)[n:]).sum()) for cache in pair.sides.values())
    parted = len({ids[n] for ids in tokens.values() if n < len(ids)}) > 1
    severity = Severity.FAULT if parted or compared < missing else Severity.NOTE
    there = ", ".join(f"{side} {ids[n] if n < len(ids) else 'ends'}" for side, ids in tokens.items())
    detail = f"at position {n}: {there}; only {compared} of {longest} positions are compared"
    figures = {"compared": float(compared), "positions": float(longest)}
    kind = "tokens part" if parted else "missing positions"
    return [Finding(Level.INPUT, kind, _where(pair), detail, severity, figures)]


def _given_back(pair: Pair) -> list[Finding]:
    """A note on positions that some sides gave back and others hold, as of a window that slides on one side only."""
    freed = {side: freed_positions(cache.record)[: pair.length] for side, cache in pair.sides.items()}
    sides = torch.stack([*freed.values()])
    some = sides.any(dim=0) & ~sides.all(dim=0)
    if not some.any():
        return []
    by = " and ".join(side for side, positions in freed.items() if (positions & some).any())
    detail = (
        f"the {by} gave back blocks that another side holds: {int(some.sum())} of {pair.length} positions "
        f"({ranges(some.nonzero().flatten().tolist())}) are not compared"
    )
    figures = {"given_back": float(some.sum()), "positions": float(pair.length)}
    kind = "given back on one side"
    return [Finding(Level.INPUT, kind, _where(pair), detail, Severity.NOTE, figures)]


def _check_same_tokens(test: Capture, reference: Capture) -> list[Finding]:
    """Raise ``CaptureError`` if token ids mean different things; a note if weights are others."""
    ours, theirs = test.run.info, reference.run.info
    for name in ("vocab_size", "tokenizer"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b and not {a, b} & _UNTOLD:
            raise CaptureError(
                f"{test.folder} has {name} {a!r}, {reference.folder} {b!r}: token ids mean different things"
            )
    if ours.revision == theirs.revision or {ours.revision, theirs.revision} & _UNTOLD:
        return []
    detail = f"the test has revision {ours.revision[:12]} and the reference {theirs.revision[:12]}"
    return [Finding(Level.INPUT, "other weights", label(ours), detail, Severity.NOTE)]


def _outcome(test: Capture, reference: Capture, findings: list[Finding], data: dict[str, Any]) -> Outcome:
    names = [label(capture.run.info) for capture in (test, reference)]
    return Outcome("kv", "KV caches", names[0], names[1], findings, data)
