# SPDX-License-Identifier: Apache-2.0
"""Frequencies of the first token after one prompt, over many seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from neuron_accuracy.findings import Finding, Level
from neuron_accuracy.sampling.expected import Expected, expected_of
from neuron_accuracy.sampling.frequencies import false_alarm_bound, frequencies_of
from neuron_accuracy.sampling.standing import distribution
from neuron_accuracy.subjects.protocol import Generation, Sampling, Scores, Subject

__all__ = ["LEAST_DRAWS", "check_frequencies", "flattest"]

LEAST_DRAWS = 10
"""With fewer, two outcomes are not expected ``frequencies.LEAST_EXPECTED`` times each."""
_SHOWN = 12


def flattest(greedy: Sequence[Generation]) -> Generation:
    """The prompt after which the first token is the least certain."""

    def certainty(made: Generation) -> float:
        _, values = distribution(made.scores, 0)
        return float((values.exp() * values).sum())

    return min(greedy, key=certainty)


def check_frequencies(
    subject: Subject,
    greedy: Generation,
    draws: int,
    *,
    top_p: float,
    false_alarm: float,
    seed: int,
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Per case its counts, and findings for those that cannot be chance, all cases together.

    A row is ``undecided`` if one outcome is all that could be expected, and a sampler that ignores the parameter would
    not have drawn enough others to be found.
    ``draws`` are at least :data:`LEAST_DRAWS`.
    """
    cases = (
        ("seed", Sampling(temperature=1.0)),
        ("temperature", Sampling(temperature=0.5)),
        ("top_p", Sampling(temperature=1.0, top_p=top_p)),
    )
    rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for number, (name, case) in enumerate(cases):
        first = seed + (1 + number) * 1_000_003
        how = [
            Sampling(case.temperature, case.top_k, case.top_p, case.min_p, first + at) for at in range(draws)
        ]
        made = subject.generate([greedy.prompt] * draws, 1, how, 1)
        row = _counted(greedy.scores, [item.tokens[0] for item in made], case, false_alarm)
        rows.append({"name": name, "temperature": case.temperature, "top_p": case.top_p, **row})
        if row["false_alarm"] <= false_alarm / len(cases):
            findings.append(_finding(name, case, row))
    return rows, findings


def _counted(scores: Scores, drawn: Sequence[int], case: Sampling, false_alarm: float) -> dict[str, Any]:
    expected = expected_of(scores, case)
    counts = frequencies_of(expected.probs, [expected.place(token) for token in drawn], expected.between)
    return {
        "draws": len(drawn),
        "bins": len(counts.observed),
        "undecided": counts.told_apart < 2 and not _shows(expected, case, len(drawn), false_alarm),
        "observed": list(counts.observed)[:_SHOWN],
        "expected": list(counts.expected)[:_SHOWN],
        "chi_square": counts.chi_square,
        "p_value": counts.p_value,
        "false_alarm": counts.false_alarm,
    }


def _shows(expected: Expected, case: Sampling, draws: int, false_alarm: float) -> bool:
    """Whether a sampler that ignores the parameter would be found where hardly anything but one token is expected."""
    if case.top_p < 1.0:
        return expected.kept**draws <= false_alarm
    others, allowed = 1.0 - expected.likeliest, 1.0 - expected.probs[0] * (1.0 - expected.between[1])
    if case.temperature == 1.0 or others <= allowed:
        return False
    # KL of two outcomes, as often as they would come at temperature 1.
    excess = others * math.log(others / max(allowed, 1e-300))
    excess += (1.0 - others) * math.log((1.0 - others) / (1.0 - allowed))
    return false_alarm_bound(draws * excess, 3) <= false_alarm


def _finding(name: str, case: Sampling, row: dict[str, Any]) -> Finding:
    settings = f"temperature={case.temperature:g}" + (f", top_p={case.top_p:g}" if case.top_p < 1 else "")
    detail = (
        f"{row['draws']} first tokens drawn at {settings}, each with a seed of its own, are not distributed as their "
        f"scores say: chi-square {row['chi_square']:.1f} over {row['bins']} bins, by chance at most once in "
        f"{1 / max(row['false_alarm'], 1e-99):.1e} checks"
    )
    kind = "frequencies" if name == "seed" else f"{name} frequencies"
    return Finding(Level.SAMPLING, kind, f"{row['draws']} seeds", detail)
