# SPDX-License-Identifier: Apache-2.0
"""How far two subjects' scores part, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuron_accuracy.logits.limits import ALL, Limits
from neuron_accuracy.logits.pairs import Pairs

__all__ = ["MASS_OF", "Measures", "measure"]

MASS_OF = 20
"""How many of the reference's likeliest tokens the probability mass is told of."""


@dataclass(frozen=True, eq=False)
class Measures:
    """Per row of one sequence, float32 ``[n]`` each."""

    errors: dict[int, torch.Tensor]
    """By k: greatest |test − reference| among the k likeliest, over the row's scale."""
    beyond: torch.Tensor
    """bool: whether any limit is exceeded."""
    divergence: torch.Tensor
    """Kullback-Leibler divergence of the test from the reference, in nats; tokens that neither lists count as one."""
    variation: torch.Tensor
    """Total variation distance: the most that the probability of any set of tokens differs."""
    mass: torch.Tensor
    """Probability the test gives to the reference's ``MASS_OF`` likeliest, or to all listed if fewer."""
    reference_mass: torch.Tensor
    """Probability the reference gives to them."""
    margin: torch.Tensor
    """The reference's likeliest less its second, in units of the values: small where greedy choices are a coin's."""


def measure(pairs: Pairs, limits: Limits) -> Measures:
    """All measures of one sequence."""
    distance = pairs.difference.abs()
    width = distance.shape[1]
    worst = {k: distance[:, : width if k == ALL else min(k, width)].amax(dim=1) for k in limits.relative}
    beyond = torch.zeros(len(distance), dtype=torch.bool)
    for k, limit in limits.relative.items():
        beyond |= worst[k] > limits.atol + limit * pairs.scale
    ours, theirs = _probabilities(pairs, pairs.reference), _probabilities(pairs, pairs.test)
    ratio = ours.clamp_min(1e-300).log() - theirs.clamp_min(1e-300).log()
    count = min(MASS_OF, width)
    return Measures(
        errors={k: value / pairs.scale.clamp_min(1e-30) for k, value in worst.items()},
        beyond=beyond,
        divergence=(ours * ratio).sum(dim=1).clamp_min(0.0).float(),
        variation=(0.5 * (ours - theirs).abs().sum(dim=1)).float(),
        mass=theirs[:, :count].sum(dim=1).float(),
        reference_mass=ours[:, :count].sum(dim=1).float(),
        margin=pairs.reference[:, 0] - pairs.reference[:, 1] if width > 1 else torch.zeros(len(distance)),
    )


def _probabilities(pairs: Pairs, values: torch.Tensor) -> torch.Tensor:
    """float64 ``[n, m]``, or ``[n, m + 1]`` with all that is not listed as the last."""
    if pairs.whole:
        return values.double().softmax(dim=1)
    probs = values.double().exp().masked_fill(pairs.ids < 0, 0.0)
    return torch.cat([probs, (1.0 - probs.sum(dim=1, keepdim=True)).clamp_min(0.0)], dim=1)
