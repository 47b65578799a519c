# SPDX-License-Identifier: Apache-2.0
"""Which module makes an error, and which only inherit it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from neuron_accuracy.capture.hooks import ROOT
from neuron_accuracy.compare.growth import judge_growth
from neuron_accuracy.compare.limits import Limits
from neuron_accuracy.compare.metrics import ratio
from neuron_accuracy.compare.requests import Pair
from neuron_accuracy.compare.score import Score
from neuron_accuracy.findings import Finding, Level

__all__ = ["judge"]

MOST_FINDINGS = 8
MOST_SERIES = 4
MOST_POINTS = 512
"""Of a series; of more rows the worst of each of so many stretches is kept."""


def judge(
    scores: Sequence[Score], pairs: Sequence[Pair], limits: Limits
) -> tuple[list[Finding], dict[str, Any]]:
    """Set each tensor's verdict, and say which are to be looked at first: what makes an error, in the order it ran; if
    that cannot be told, what diverges first.
    """
    if scores and (len(scores[0].dtypes) == 2 or scores[0].dtypes[0] == scores[0].dtypes[1]):
        judge_growth(scores, limits)
    _set_verdicts(scores, limits)
    makes = [item for item in scores if item.verdict == "makes"]
    first = next((item for item in scores if item.reasons), None)
    leading = makes or ([first] if first is not None else [])
    findings = [_finding(item, scores) for item in leading[:MOST_FINDINGS]]
    shown = [*leading, *(item for item in scores if item.reasons and item not in leading)][:MOST_SERIES]
    names = [pair.test.request for pair in pairs]
    data = {
        "requests": [
            {
                "test": pair.test.request,
                "reference": pair.reference.request,
                "positions": len(pair.positions),
            }
            for pair in pairs
        ],
        "first": leading[0].name if leading else None,
        "modules": [item.to_json() for item in scores],
        "series": {item.name: _series(item, names) for item in shown},
        "heads": {item.name: [vars(head).copy() for head in item.heads] for item in scores if item.heads},
        "gains": {item.name: [vars(gain).copy() for gain in item.gains] for item in scores if item.gains},
    }
    return findings, data


def _set_verdicts(scores: Sequence[Score], limits: Limits) -> None:
    inputs = {item.module: item for item in scores if item.name.endswith(":input.0")}
    astray = {item.module for item in scores if item.is_input and item.reasons}
    makers: list[str] = []
    diverged = False
    for item in scores:
        given = inputs.get(item.module)
        if not item.is_input and given is not None:
            item.input_rel_l2 = given.tally.rel_l2
        if not item.reasons:
            continue
        if item.is_input or given is None or item.module in astray:
            # A module's input is written when it ends, after what its children made of it.
            item.verdict = "inherits" if diverged else "diverges"
        elif _inside(item.module, makers) or _explained(item, given, limits, bool(makers)):
            item.verdict = "inherits" if diverged else "diverges"
        else:
            item.verdict = "makes"
            makers.append(item.module)
        diverged = True


def _inside(module: str, makers: Sequence[str]) -> bool:
    """Whether a maker is this module or a part of it."""
    if module == ROOT:
        return bool(makers)
    return any(maker == module or maker.startswith(f"{module}.") for maker in makers)


def _explained(item: Score, given: Score, limits: Limits, after: bool) -> bool:
    """Whether the error of the input explains the output's; after a first maker, whatever is not plainly clean does."""
    if item.tally.not_finite:
        return False
    if after:
        return given.error > item.allowed.made / 4
    return (
        not item.local
        and not item.grew
        and item.tally.rel_l2 <= item.allowed.made + limits.growth * given.error
    )


def _finding(item: Score, scores: Sequence[Score]) -> Finding:
    where = ", ".join([item.name, *item.sharper])
    detail = "; ".join(item.reasons)
    if item.sources[0] != item.name:
        detail += f"; the test calls it {item.sources[0]}"
    detail += "; " + _context(item, scores)
    kind = "not finite" if item.tally.not_finite else "diverges"
    figures = {name: float(value) for name, value in item.figures.items()}
    return Finding(Level.TENSOR, kind, where, detail, figures=figures)


def _context(item: Score, scores: Sequence[Score]) -> str:
    before = [other for other in scores[: scores.index(item)] if not other.is_input]
    if item.verdict == "makes":
        text = f"its input agrees (rel_l2 {item.input_rel_l2:.3g})"
        inside = [other for other in scores if other.module.startswith(f"{item.module}.")]
        given = [other for other in inside if other.is_input and other.reasons]
        if given:
            text += f", that of its {given[0].module.removeprefix(item.module + '.')} does not: it lies between them"
        return text
    agree = [other for other in before if not other.reasons]
    last = (
        f"; the last before it that agrees is {agree[-1].name}"
        if agree
        else "; nothing before it was compared"
    )
    if item.is_input:
        return (
            "what the module is given already diverges, so the fault lies before it, in what was not captured"
            + last
        )
    known = next((other for other in scores if other.name == f"{item.module}:input.0"), None)
    if known is None:
        return "its input was not captured, so it may inherit this" + last
    if not known.reasons:
        return f"its input is nearly as far off (rel_l2 {known.tally.rel_l2:.3g}): errors pile up" + last
    return f"its input diverges already (rel_l2 {known.tally.rel_l2:.3g}), by what was not captured" + last


def _series(item: Score, names: Sequence[str]) -> list[dict[str, Any]]:
    pairs, positions, error, reference, own = item.tally.by_row()
    three_way = len(item.dtypes) == 3
    found = []
    for pair in pairs.unique().tolist():
        here = (pairs == pair).nonzero().flatten()
        here = here[positions[here].argsort()]
        far = [
            ratio(math.sqrt(a), math.sqrt(b))
            for a, b in zip(error[here].tolist(), reference[here].tolist(), strict=True)
        ]
        keep = _worst_of_stretches(far)
        entry = {
            "request": names[pair],
            "positions": positions[here][keep].tolist(),
            "rel_l2": [far[index] for index in keep],
        }
        if three_way:
            entry["reference_rel_l2"] = [
                ratio(math.sqrt(float(own[here[index]])), math.sqrt(float(reference[here[index]])))
                for index in keep
            ]
        found.append(entry)
    return found


def _worst_of_stretches(values: Sequence[float]) -> list[int]:
    if len(values) <= MOST_POINTS:
        return list(range(len(values)))
    stretches = torch.arange(len(values)).tensor_split(MOST_POINTS)
    return [max(stretch.tolist(), key=lambda index: values[index]) for stretch in stretches]
