# SPDX-License-Identifier: Apache-2.0
"""How often each token should be drawn, as far as scores say it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.sampling.standing import MASS_TOLERANCE, distribution
from neuron_accuracy.subjects.protocol import Sampling, Scores

__all__ = ["Expected", "expected_of"]

_LOWEST = -1e4
"""In the place of a log-probability of minus infinity."""


@dataclass(frozen=True, eq=False)
class Expected:
    """Outcomes of a draw: tokens whose shares of one another are known, and all others that may be drawn as one.

    What share that one has is known between bounds only; where they are 0, there is none.
    """

    probs: list[float]
    """Of the known tokens among themselves; they sum to 1."""
    between: tuple[float, float]
    """Least and most share of the open outcome, whose index is ``len(probs)``."""
    places: dict[int, int]
    """Index by token id; -1 for what must not be drawn."""
    unlisted: int
    """The same for a token that the scores do not list."""
    likeliest: float
    """Probability of the likeliest token at temperature 1."""
    kept: float
    """What all that may be drawn has of the probability at temperature 1 without limits, at most."""

    def place(self, token: int) -> int:
        """The index of a token that was drawn."""
        return self.places.get(token, self.unlisted)


def expected_of(scores: Scores, case: Sampling) -> Expected:
    """What a draw from the first row has to follow, at a temperature of at most 1, or under ``top_p`` at 1.

    Scores are true to :data:`MASS_TOLERANCE`. Unlisted tokens have mass m together and at most the least listed
    probability l each. At temperature T <= 1 their weights p^(1/T) = p p^(1/T - 1) sum to at most m l^(1/T - 1), and to
    nothing if they are many: a bound on their share, and none from below but at T = 1. Under ``top_p`` the open outcome
    are the tokens of which rounding may keep any: the mass before them is ``top_p``, or is once those that rank
    either way are counted. If S is certainly kept and A open, its share is at most P(A) / P(S or A).

    Raises ``AccuracyError`` if fewer tokens are listed than can be judged.
    """
    ids, values = distribution(scores, 0)
    if len(ids) < 2:
        raise AccuracyError(f"{len(ids)} token is listed of each position; 20 work")
    if case.top_p < 1.0:
        return _under_top_p(ids, values, case.top_p, scores.logits is None)
    weights = ((values - values[0]) / case.temperature).exp()
    total, between = float(weights.sum()), (0.0, 0.0)
    if scores.logits is None:
        mass = 1.0 - float(values.exp().sum())
        rest = max(mass, 0.0) + MASS_TOLERANCE
        lowest = max(float(values[-1]), _LOWEST)
        # In units of the likeliest's weight, as all are.
        most = rest * math.exp(lowest * (1.0 / case.temperature - 1.0) - float(values[0]) / case.temperature)
        least = max(mass - MASS_TOLERANCE, 0.0) if case.temperature == 1.0 else 0.0
        between = (least, most / (total + most))
    places = {token: place for place, token in enumerate(ids.tolist())}
    unlisted = len(ids) if scores.logits is None else -1
    return Expected((weights / total).tolist(), between, places, unlisted, float(values[0].exp()), 1.0)


def _under_top_p(ids: torch.Tensor, values: torch.Tensor, top_p: float, listing: bool) -> Expected:
    # Limits look at true masses, of which the unlisted keep their share.
    probs = values.exp()
    if listing and float(probs.sum()) < top_p + MASS_TOLERANCE:
        raise AccuracyError(
            f"top_p={top_p}: the {len(values)} tokens listed have less probability together; list more"
        )
    masses = torch.cat([torch.zeros(1, dtype=probs.dtype), probs.cumsum(0)])
    likelier = torch.searchsorted(-values, -(values + MASS_TOLERANCE), side="left")
    no_less_likely = torch.searchsorted(-values, -(values - MASS_TOLERANCE), side="right")
    certain = masses[no_less_likely] - probs < top_p - MASS_TOLERANCE
    open_too = ~certain & (masses[likelier] < top_p + MASS_TOLERANCE)
    known, rest = probs[certain], float(probs[open_too].sum())
    kept = float(known.sum()) + rest
    places = dict.fromkeys(ids.tolist(), -1)
    places |= {token: place for place, token in enumerate(ids[certain].tolist())}
    places |= dict.fromkeys(ids[open_too].tolist(), len(known))
    return Expected((known / known.sum()).tolist(), (0.0, rest / kept), places, -1, float(probs[0]), kept)
