# SPDX-License-Identifier: Apache-2.0
"""All that is said of one prompt, from the scores of its subjects alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from neuron_accuracy.logits.greedy import Parting, parting_of
from neuron_accuracy.logits.limits import Limits
from neuron_accuracy.logits.measures import Measures, measure
from neuron_accuracy.logits.noise import Noise, centred, ratio
from neuron_accuracy.logits.pairs import Pairs, finite_rows, pair
from neuron_accuracy.subjects.protocol import Generation, Scores

__all__ = ["Examined", "Series", "described", "examine", "selected"]


@dataclass(frozen=True, eq=False)
class Series:
    """Measures of those rows of a sequence that are finite on all sides."""

    rows: list[int]
    measures: Measures
    whole: bool
    """Whether logits were compared, of all tokens, and not log-probabilities of those listed."""
    greatest: float
    """The greatest |test − truth| of any token in any row."""

    @property
    def bad(self) -> list[int]:
        """Tokens beyond limits, counted from the first generated."""
        return [row for row, beyond in zip(self.rows, self.measures.beyond.tolist(), strict=True) if beyond]


@dataclass(frozen=True, eq=False)
class Examined:
    """One prompt: the test forced along the truth's tokens, and its own generation up to where it parts.

    Rows of logits are not kept.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The truth's."""
    forced: Series
    own: Series
    parting: Parting | None
    not_finite: dict[str, list[int]]
    """Tokens whose scores are not finite, by the side that has them."""
    noise: Noise = field(default_factory=Noise)
    """Errors of the test beside those of the reference in the target dtype; of nothing if there is none."""
    token_linf: list[float] = field(default_factory=list)
    """Per row of ``forced``: the test's greatest error over the reference's."""
    token_l2: list[float] = field(default_factory=list)

    @property
    def first_bad(self) -> int | None:
        """The first token that is beyond limits or not finite on the test's side, forced or in its own generation."""
        bad = [*self.forced.bad, *self.own.bad, *self.not_finite.get("test", ())]
        return min(bad, default=None)


def selected(scores: Scores, rows: Sequence[int]) -> Scores:
    """The given rows."""
    at = torch.tensor(list(rows), dtype=torch.int64)
    logits = None if scores.logits is None else scores.logits[at]
    return Scores(
        scores.begin, scores.chosen_logprobs[at], scores.top_ids[at], scores.top_logprobs[at], logits
    )


def examine(
    truth: Generation, forced: Scores, own: Generation, limits: Limits, reference: Scores | None = None
) -> Examined:
    """Hold the test's ``forced`` scores and its ``own`` greedy generation against the truth's.

    ``reference`` are the scores of the reference in the target dtype, in a three-way comparison.
    """
    sides = {"test": forced, "reference": truth.scores, "reference in the target dtype": reference}
    not_finite = {name: _infinite(scores) for name, scores in sides.items() if scores is not None}
    taken = sorted(set(range(len(truth.tokens))) - {row for rows in not_finite.values() for row in rows})
    pairs = pair(selected(truth.scores, taken), selected(forced, taken))
    noise = Noise()
    linf: list[float] = []
    l2: list[float] = []
    if reference is not None and taken:
        noise, linf, l2 = _noise(pairs, selected(truth.scores, taken), selected(reference, taken))
    scale = float(pairs.scale.max()) if taken else 0.0
    parting = parting_of(truth.tokens, own.tokens, truth.scores, limits, noise.base_worst, scale)
    same = len(truth.tokens) if parting is None else parting.index + 1
    wild = set(_infinite(own.scores))
    alike = [row for row in range(same) if row not in wild and row not in not_finite["reference"]]
    not_finite["test"] = sorted({*not_finite["test"], *(row for row in wild if row < same)})
    series = _series(alike, pair(selected(truth.scores, alike), selected(own.scores, alike)), limits)
    return Examined(
        truth.prompt,
        truth.tokens,
        _series(taken, pairs, limits),
        series,
        parting,
        not_finite,
        noise,
        linf,
        l2,
    )


def _infinite(scores: Scores) -> list[int]:
    return [row for row, finite in enumerate(finite_rows(scores).tolist()) if not finite]


def _series(rows: list[int], pairs: Pairs, limits: Limits) -> Series:
    greatest = float(pairs.difference.abs().max()) if rows else 0.0
    return Series(rows, measure(pairs, limits), pairs.whole, greatest)


def _noise(pairs: Pairs, ours: Scores, theirs: Scores) -> tuple[Noise, list[float], list[float]]:
    """Errors of the test in ``pairs`` beside those of ``theirs`` against the truth, ``ours``."""
    errors = pairs.difference
    if pairs.whole and theirs.logits is not None:
        base = centred(pair(ours, theirs).difference)
        errors = centred(errors)
    elif ours.logits is not None and theirs.logits is not None:
        base = _listed(theirs.logits, pairs.ids) - _listed(ours.logits, pairs.ids)
    else:
        base = pair(ours, theirs).difference
    linf = _ratios(errors.abs().amax(dim=1), base.abs().amax(dim=1))
    l2 = _ratios(errors.square().mean(dim=1).sqrt(), base.square().mean(dim=1).sqrt())
    return Noise.of(base, errors), linf, l2


def _listed(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)


def _ratios(test: torch.Tensor, base: torch.Tensor) -> list[float]:
    return [ratio(ours, theirs) for ours, theirs in zip(test.tolist(), base.tolist(), strict=True)]


def described(examined: Examined, index: int, text: str | None, limits: Limits) -> dict[str, Any]:
    """The prompt's entry in ``Outcome.data["prompts"]``."""
    measures, noise = examined.forced.measures, examined.noise
    three_way = noise.base_count > 0
    parting = examined.parting
    return {
        "prompt": index,
        "text": None if text is None else text[:200],
        "prompt_tokens": len(examined.prompt),
        "tokens": list(examined.tokens),
        "first_bad": examined.first_bad,
        "not_finite": {name: rows for name, rows in examined.not_finite.items() if rows},
        "worst": {
            limits.names[k]: max((*values.tolist(), *examined.own.measures.errors[k].tolist()), default=0.0)
            for k, values in measures.errors.items()
        },
        "parting": None if parting is None else {**vars(parting), "tie": parting.tie},
        "sigma_ratio": noise.sigma_ratio if three_way else None,
        "bhattacharyya": noise.bhattacharyya if three_way else None,
        "linf_ratio": noise.linf_ratio if three_way else None,
        "forced": _table(examined.forced, limits)
        | {"linf_ratio": examined.token_linf, "l2_ratio": examined.token_l2},
        "own": _table(examined.own, limits),
    }


def _table(series: Series, limits: Limits) -> dict[str, Any]:
    measures = series.measures
    return {
        "token": series.rows,
        "error": {limits.names[k]: values.tolist() for k, values in measures.errors.items()},
        "divergence": measures.divergence.tolist(),
        "variation": measures.variation.tolist(),
        "mass": measures.mass.tolist(),
        "reference_mass": measures.reference_mass.tolist(),
        "margin": measures.margin.tolist(),
    }
