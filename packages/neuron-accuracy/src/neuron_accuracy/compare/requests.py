# SPDX-License-Identifier: Apache-2.0
"""Which request of one run is which of another, and where each of their tokens' rows are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import StepRecord
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.findings import Finding, Level, Severity

__all__ = ["Pair", "Place", "Trace", "pair_requests", "ranges", "traces"]


class Place(NamedTuple):
    """Where the row of one token is."""

    dp: int
    step: int
    """Index among the replica's steps."""
    row: int
    """Among the step's tokens."""
    seq: int
    """Among the step's requests if it is the request's last token in the step, else -1."""


@dataclass(frozen=True)
class Trace:
    """All tokens of a request that a capture has, by position; of a position that ran twice, the last.

    A position without a place was not computed: the cache held it already.
    """

    request: str
    tokens: Mapping[int, int]
    places: Mapping[int, Place]


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


def traces(capture: Capture) -> list[Trace]:
    """Every request of a capture, in the order they were first seen."""
    tokens: dict[str, dict[int, int]] = defaultdict(dict)
    places: dict[str, dict[int, Place]] = defaultdict(dict)
    for dp in capture.replicas:
        for index, step in enumerate(capture.steps(dp)):
            _add(dp, index, step, tokens, places)
    return [Trace(name, tokens[name], places[name]) for name in tokens]


def pair_requests(test: Capture, reference: Capture) -> tuple[list[Pair], list[Finding]]:
    """Pair requests by the longest common beginning of their tokens, each once.

    What is not paired, has positions on one side only, or parts from its pair, is a finding. Raises ``CaptureError``
    if no two requests begin alike.
    """
    left, right = traces(test), traces(reference)
    pairs = _matched(left, right)
    if not pairs:
        raise CaptureError(
            f"no request of {test.folder} begins with the tokens of one of {reference.folder} "
            f"({_shown(left)} against {_shown(right)}): capture the same prompts in both"
        )
    findings = [finding for pair in pairs for finding in _unlike(pair, test, reference)]
    for side, held, used, other in (
        ("test", left, {pair.test.request for pair in pairs}, reference),
        ("reference", right, {pair.reference.request for pair in pairs}, test),
    ):
        alone = [trace.request for trace in held if trace.request not in used]
        detail = f"only the {side} has it: none of the other's begins with its tokens"
        # A capture that was told to leave requests out is no fault of the run.
        severity = Severity.NOTE if other.spec.requests else Severity.FAULT
        findings += [Finding(Level.INPUT, "request without a pair", name, detail, severity) for name in alone]
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


def _add(
    dp: int,
    index: int,
    step: StepRecord,
    tokens: dict[str, dict[int, int]],
    places: dict[str, dict[int, Place]],
) -> None:
    for row in step.rows:
        tokens[row.request].update(enumerate(row.cached_ids))
        last = len(row.positions) - 1
        for offset, (position, token) in enumerate(zip(row.positions, row.token_ids, strict=True)):
            tokens[row.request][position] = token
            seq = row.row if offset == last else -1
            places[row.request][position] = Place(dp, index, row.begin + offset, seq)


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


def _unlike(pair: Pair, test: Capture, reference: Capture) -> list[Finding]:
    test_tokens, reference_tokens = pair.test.tokens, pair.reference.tokens
    common = sorted(test_tokens.keys() & reference_tokens.keys())
    findings = []
    agreed = _shared(pair.test, pair.reference)
    if len(common) > len(agreed):
        at = common[len(agreed)]
        detail = (
            f"at position {at} the test has token {test_tokens[at]} and the reference {reference_tokens[at]}; "
            f"from there on nothing is compared"
        )
        findings.append(Finding(Level.INPUT, "tokens part", pair.test.request, detail))
        return findings
    for name, held, other, spec in (
        ("test", test_tokens, reference_tokens, test.spec),
        ("reference", reference_tokens, test_tokens, reference.spec),
    ):
        if missing := sorted(other.keys() - held.keys()):
            # A capture that was told to leave steps out is no fault of the run.
            filtered = bool(spec.phases or spec.steps)
            severity = Severity.NOTE if filtered else Severity.FAULT
            detail = f"the {name} has no rows of positions {ranges(missing)}" + (
                ", as its phases or steps were asked for" if filtered else ""
            )
            findings.append(Finding(Level.INPUT, "missing positions", pair.test.request, detail, severity))
    return findings


def _shown(held: Sequence[Trace]) -> str:
    if not held:
        return "no request at all"
    first = [held[0].tokens[position] for position in sorted(held[0].tokens)[:4]]
    return f"{held[0].request!r} begins with {first}"
