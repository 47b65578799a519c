# SPDX-License-Identifier: Apache-2.0
"""Which request of one run is which of another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.compare.filters import Filters, may_lack_request
from neuron_accuracy.compare.traces import Trace, traces
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.findings import Finding, Level, Severity

__all__ = ["Pair", "pair_requests", "ranges"]


@dataclass(frozen=True)
class Pair:
    """A request of two runs."""

    test: Trace
    reference: Trace
    positions: tuple[int, ...]
    """Those that both computed, up to where their tokens part."""

    @classmethod
    def of(cls, test: Trace, reference: Trace, shared: Sequence[int]) -> Pair:
        """With those of the ``shared`` positions that neither found in its cache."""
        computed = tuple(at for at in shared if at in test.places and at in reference.places)
        return cls(test, reference, computed)


def pair_requests(
    test: Capture, reference: Capture, side: str = "reference"
) -> tuple[list[Pair], list[Finding]]:
    """Pair requests by the longest common beginning of their tokens, each once.

    What is not paired, has positions on one side only, or parts from its pair, is a finding, which calls the other
    capture the ``side`` it is on. Raises ``CaptureError`` if no two requests begin alike.
    """
    left, right = traces(test), traces(reference)
    pairs = _matched(left, right)
    if not pairs:
        raise CaptureError(
            f"no request of {test.folder} begins with the tokens of one of {reference.folder} "
            f"({_shown(left)} against {_shown(right)}): capture the same prompts in both"
        )
    findings = [finding for pair in pairs for finding in _unlike(pair, test, reference, side)]
    same_ids = all(pair.test.key[1] == pair.reference.key[1] for pair in pairs)
    for held, used, other, others in (
        (left, {pair.test.key for pair in pairs}, reference, side),
        (right, {pair.reference.key for pair in pairs}, test, "test"),
    ):
        for trace in (trace for trace in held if trace.key not in used):
            detail = f"none of the {others}'s begins with its tokens, so it is not compared"
            severity = Severity.FAULT
            if may_lack_request(other.spec, trace.key[1], same_ids):
                severity = Severity.NOTE
                detail += f"; requests of the {others} were asked for by id"
            findings.append(Finding(Level.INPUT, "request without a pair", trace.request, detail, severity))
    return pairs, findings


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: ``0–3, 7``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [str(begin) if begin == end else f"{begin}–{end}" for begin, end in spans[:8]]
    return ", ".join(shown) + (", …" if len(spans) > 8 else "")


def _matched(left: Sequence[Trace], right: Sequence[Trace]) -> list[Pair]:
    pairs = _equal(left, right)
    taken = {id(pair.reference) for pair in pairs.values()}
    scored = []
    for i in (i for i in range(len(left)) if i not in pairs):
        for j, other in enumerate(right):
            if id(other) not in taken and (shared := _shared(left[i], other)):
                # Of equal beginnings, those that end together belong together: one prompt may begin another.
                spare = len(left[i].tokens) + len(other.tokens) - 2 * len(shared)
                scored.append((-len(shared), spare, i, j, shared))
    for _, _, i, j, shared in sorted(scored, key=lambda item: item[:4]):
        if i not in pairs and id(right[j]) not in taken:
            taken.add(id(right[j]))
            pairs[i] = Pair.of(left[i], right[j], shared)
    return [pairs[i] for i in sorted(pairs)]


def _equal(left: Sequence[Trace], right: Sequence[Trace]) -> dict[int, Pair]:
    """Requests with the same tokens throughout, as most have, found without trying each with each."""
    waiting: dict[tuple[tuple[int, int], ...], list[Trace]] = defaultdict(list)
    for other in reversed(right):
        waiting[tuple(sorted(other.tokens.items()))].append(other)
    pairs = {}
    for i, trace in enumerate(left):
        if same := waiting[tuple(sorted(trace.tokens.items()))]:
            pairs[i] = Pair.of(trace, same.pop(), sorted(trace.tokens))
    return pairs


def _shared(trace: Trace, other: Trace) -> tuple[int, ...]:
    """Positions up to which their tokens agree."""
    common = sorted(trace.tokens.keys() & other.tokens.keys())
    for count, position in enumerate(common):
        if trace.tokens[position] != other.tokens[position]:
            return tuple(common[:count])
    return tuple(common)


def _unlike(pair: Pair, test: Capture, reference: Capture, side: str) -> list[Finding]:
    test_tokens, reference_tokens = pair.test.tokens, pair.reference.tokens
    common = sorted(test_tokens.keys() & reference_tokens.keys())
    agreed = _shared(pair.test, pair.reference)
    if len(common) > len(agreed):
        at = common[len(agreed)]
        detail = (
            f"at position {at} the test has token {test_tokens[at]} and the {side} {reference_tokens[at]}; "
            f"from there on nothing is compared"
        )
        return [Finding(Level.INPUT, "tokens part", pair.test.request, detail)]
    ours, theirs = (test, pair.test), (reference, pair.reference)
    return [
        finding
        for name, own, other in (("test", ours, theirs), (side, theirs, ours))
        for finding in _missing(name, pair.test.request, own, other)
    ]


def _missing(
    name: str, request: str, own: tuple[Capture, Trace], other: tuple[Capture, Trace]
) -> Iterator[Finding]:
    """What one side has no rows of: a fault, but where that capture was told to leave out what it may be in."""
    missing = sorted(other[1].tokens.keys() - own[1].tokens.keys())
    if not missing:
        return
    filters = Filters(*own, *other)
    told = [at for at in missing if filters.may_lack(at)]
    for positions, severity, why in (
        (sorted({*missing} - {*told}), Severity.FAULT, ""),
        (told, Severity.NOTE, ", as its phases or steps were asked for"),
    ):
        if positions:
            detail = f"the {name} has no rows of positions {ranges(positions)}{why}"
            yield Finding(Level.INPUT, "missing positions", request, detail, severity)


def _shown(held: Sequence[Trace]) -> str:
    if not held:
        return "no request at all"
    first = [held[0].tokens[position] for position in sorted(held[0].tokens)[:4]]
    return f"{held[0].request!r} begins with {first}"
