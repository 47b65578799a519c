# SPDX-License-Identifier: Apache-2.0
"""Results held against the expectations: what failed unexpectedly, and what is listed without need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .expectations import RUNNABLE, Expectation
from .record import Result

LEAST_SHARE = 0.97
"""Of the tests that can run here, how many pass at least, over all folders together."""


@dataclass
class Verdict:
    """What one folder of tests did, by node id."""

    folder: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Tests that failed and are not listed, with what they said."""
    listed: dict[str, Expectation] = field(default_factory=dict)
    """Tests that failed, as listed."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Tests that upstream itself leaves out on this machine, with its reason."""
    needless: list[str] = field(default_factory=list)
    """Tests that are listed, not as flaky, and passed; they are in ``passed`` too."""
    stale: list[str] = field(default_factory=list)
    """Patterns that match no test of a folder that ran whole."""
    seconds: float = 0.0

    @property
    def by_kind(self) -> Counter[str]:
        """How many tests are listed for which kind of reason."""
        return Counter(expectation.kind for expectation in self.listed.values())

    @property
    def can_run(self) -> int:
        """How many tests ran or could have: all but those that need what is not here."""
        return len(self.passed) + len(self.failed) + sum(self.by_kind[kind] for kind in RUNNABLE)

    @property
    def is_good(self) -> bool:
        """Whether nothing failed that is not listed, and nothing is listed without need."""
        return not (self.failed or self.needless or self.stale)


def share(verdicts: Sequence[Verdict]) -> float:
    """Of the tests that can run here, the part that passed; 1 where there is none."""
    can_run = sum(verdict.can_run for verdict in verdicts)
    return sum(len(verdict.passed) for verdict in verdicts) / can_run if can_run else 1.0


def judge(
    folder: str,
    results: Mapping[str, Result],
    expectations: Sequence[Expectation],
    *,
    paths: Sequence[str],
    whole: bool,
) -> Verdict:
    """Hold ``results`` against the expectations on tests under ``paths``; ``whole`` if all of them ran."""
    verdict = Verdict(folder, seconds=sum(result.seconds for result in results.values()))
    for node_id, result in results.items():
        listing = next((each for each in expectations if each.matches(node_id)), None)
        if result.outcome == "passed":
            verdict.passed.append(node_id)
            if listing is not None and not listing.flaky:
                verdict.needless.append(node_id)
        elif result.outcome == "skipped":
            verdict.skipped[node_id] = result.message
        elif listing is None:
            verdict.failed[node_id] = result.message
        else:
            verdict.listed[node_id] = listing
    if whole:
        verdict.stale = [
            pattern
            for expectation in expectations
            for pattern, expression in zip(expectation.patterns, expectation.expressions, strict=True)
            if _is_under(pattern, paths) and not any(map(expression.fullmatch, results))
        ]
    return verdict


def _is_under(pattern: str, paths: Sequence[str]) -> bool:
    file = pattern.partition("::")[0]
    return any(file == path or file.startswith(f"{path}/") for path in paths)
