# SPDX-License-Identifier: Apache-2.0
"""Frequencies of the first token after one prompt, over many seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Finding, Level
from neuron_accuracy.sampling.frequencies import frequencies_of
from neuron_accuracy.sampling.standing import distribution
from neuron_accuracy.subjects.drawing import limited
from neuron_accuracy.subjects.protocol import Generation, Sampling, Scores, Subject

__all__ = ["check_frequencies", "flattest"]

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
    """Per case its counts, and findings for those that cannot be chance, all cases together."""
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
        row = _counted(greedy.scores, [item.tokens[0] for item in made], case)
        rows.append({"name": name, "temperature": case.temperature, "top_p": case.top_p, **row})
        if row["false_alarm"] <= false_alarm / len(cases):
            findings.append(_finding(name, case, row))
    return rows, findings


def _counted(scores: Scores, drawn: Sequence[int], case: Sampling) -> dict[str, Any]:
    ids, values = distribution(scores, 0)
    plain = case.temperature == 1.0 and case.top_p == 1.0
    if len(ids) < 2:
        raise AccuracyError(f"{len(ids)} token is listed of each position; 20 work")
    listed = {token: place for place, token in enumerate(ids.tolist())}
    places = [listed.get(token, -1) for token in drawn]
    if plain and scores.logits is None:
        # What is not listed is one more outcome.
        probs = [*values.exp().tolist(), max(1.0 - float(values.exp().sum()), 0.0)]
        places = [place if place >= 0 else len(ids) for place in places]
    else:
        probs = _expected(scores, values, case)
        if scores.logits is None and case.top_p == 1.0:
            # At another temperature how likely the unlisted are together is not known: given that one is listed.
            places = [place for place in places if place >= 0]
    counts = frequencies_of(probs, places)
    return {
        "draws": len(places),
        "bins": len(counts.observed),
        "observed": list(counts.observed)[:_SHOWN],
        "expected": list(counts.expected)[:_SHOWN],
        "chi_square": counts.chi_square,
        "p_value": counts.p_value,
        "false_alarm": counts.false_alarm,
    }


def _expected(scores: Scores, values: torch.Tensor, case: Sampling) -> list[float]:
    if scores.logits is None and case.top_p < 1.0:
        if float(values.exp().sum()) < case.top_p:
            raise AccuracyError(
                f"top_p={case.top_p}: the {len(values)} tokens listed have less probability together; list more"
            )
        # Limits look at true masses, of which the unlisted keep their share.
        kept = values.exp().where(values.exp().cumsum(0) - values.exp() < case.top_p, 0.0)
        shares: list[float] = (kept / kept.sum()).tolist()
        return shares
    shares = limited(values, case).tolist()
    return shares


def _finding(name: str, case: Sampling, row: dict[str, Any]) -> Finding:
    settings = f"temperature={case.temperature:g}" + (f", top_p={case.top_p:g}" if case.top_p < 1 else "")
    detail = (
        f"{row['draws']} first tokens drawn at {settings}, each with a seed of its own, are not distributed as their "
        f"scores say: chi-square {row['chi_square']:.1f} over {row['bins']} bins, by chance at most once in "
        f"{1 / max(row['false_alarm'], 1e-99):.1e} checks"
    )
    kind = "frequencies" if name == "seed" else f"{name} frequencies"
    return Finding(Level.SAMPLING, kind, f"{row['draws']} seeds", detail)
