# SPDX-License-Identifier: Apache-2.0
"""Where a drawn token stands among all, by the scores it was drawn from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from neuron_accuracy.subjects.protocol import Sampling, Scores

__all__ = ["MASS_TOLERANCE", "TIE", "Standing", "allowed_mass", "distribution", "inside", "standing_of"]

MASS_TOLERANCE = 1e-3
"""How exactly masses and log-probabilities are known from scores that were rounded on their way."""
TIE = 1e-4
"""Log-probabilities closer than this count as equal: which of them ranks first is rounding's choice."""


@dataclass(frozen=True)
class Standing:
    """A token among those of its position."""

    mass_above: float
    """Probability of all tokens that are likelier; of those listed, if this one is not listed."""
    rank: int
    """How many tokens are likelier, in the same sense."""
    below_top: float
    """Log-probability of the likeliest less this token's."""


def distribution(scores: Scores, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 and log-probabilities float64 ``[m]`` of all tokens, or of those listed, in falling order."""
    if scores.logits is None:
        return scores.top_ids[row], scores.top_logprobs[row].double()
    values, ids = scores.logits[row].double().log_softmax(-1).sort(descending=True, stable=True)
    return ids, values


def standing_of(scores: Scores, row: int, token: int) -> Standing:
    """The standing of a token that was drawn from ``row`` of its scores."""
    ids, values = distribution(scores, row)
    at = (ids == token).nonzero()
    own = float(values[at[0, 0]]) if len(at) else float(values[-1]) - 2 * TIE
    if not len(at) and not math.isnan(float(scores.chosen_logprobs[row])):
        own = float(scores.chosen_logprobs[row])
    likelier = values > own + TIE
    return Standing(float(values[likelier].exp().sum()), int(likelier.sum()), float(values[0]) - own)


def inside(standing: Standing, sampling: Sampling, tolerance: float) -> bool:
    """Whether a token may be drawn under the limits, which hold at temperature 1; masses are true to ``tolerance``."""
    if sampling.top_k > 0 and standing.rank >= sampling.top_k:
        return False
    if sampling.min_p > 0 and standing.below_top > -math.log(sampling.min_p) + tolerance:
        return False
    return standing.mass_above < sampling.top_p + tolerance


def allowed_mass(scores: Scores, row: int, sampling: Sampling, tolerance: float) -> float:
    """How often a sampler without limits would draw what :func:`inside` lets pass.

    That is the probability of all listed tokens that may be drawn, and that of the unlisted if they would pass.
    """
    _, values = distribution(scores, row)
    probs = values.exp()
    above = torch.searchsorted(-values, -(values + TIE), side="left")
    before = torch.cat([torch.zeros(1, dtype=probs.dtype), probs.cumsum(0)])[above]
    kept = before < sampling.top_p + tolerance
    if sampling.top_k > 0:
        kept &= above < sampling.top_k
    if sampling.min_p > 0:
        kept &= values[0] - values <= -math.log(sampling.min_p) + tolerance
    mass, listed = float(probs[kept].sum()), float(probs.sum())
    unlisted = Standing(listed, len(values), float(values[0] - values[-1]))
    if scores.logits is None and inside(unlisted, sampling, tolerance):
        mass += 1.0 - listed
    return min(mass, 1.0)
