# SPDX-License-Identifier: Apache-2.0
"""Whether counts are draws from a known distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["LEAST_EXPECTED", "Frequencies", "binned", "false_alarm_bound", "frequencies_of"]

LEAST_EXPECTED = 5.0
"""Tokens expected fewer times than this are counted together."""


@dataclass(frozen=True)
class Frequencies:
    """Counts beside what a distribution expects."""

    observed: tuple[int, ...]
    expected: tuple[float, ...]

    @property
    def chi_square(self) -> float:
        """Pearson's statistic."""
        pairs = zip(self.observed, self.expected, strict=True)
        return sum((count - mean) ** 2 / mean if mean else math.inf * bool(count) for count, mean in pairs)

    @property
    def p_value(self) -> float:
        """Of the chi-square, in the limit of many draws."""
        if len(self.observed) < 2 or math.isinf(self.chi_square):
            return float(not math.isinf(self.chi_square))
        half = torch.tensor([(len(self.observed) - 1) / 2, self.chi_square / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))

    @property
    def excess(self) -> float:
        """n · KL(observed ‖ expected): half the likelihood-ratio statistic G."""
        pairs = zip(self.observed, self.expected, strict=True)
        terms = (count * math.log(count / mean) if mean else math.inf for count, mean in pairs if count)
        return max(sum(terms), 0.0)

    @property
    def false_alarm(self) -> float:
        """At most this often draws from the expected distribution lie as far from it."""
        return false_alarm_bound(self.excess, len(self.observed))


def false_alarm_bound(excess: float, bins: int) -> float:
    """P(n · KL(observed ‖ expected) ≥ ``excess``) is at most this for any n: e^(−x) (e x / (k − 1))^(k − 1).

    R. Agrawal, Finite-sample concentration of the multinomial in relative entropy, IEEE Trans. Inf. Theory 66 (2020).
    """
    if math.isinf(excess):
        return 0.0
    degrees = bins - 1
    if degrees == 0 or excess <= degrees:
        return 1.0
    return math.exp(-excess + degrees * (1.0 + math.log(excess / degrees)))


def binned(probs: Sequence[float], draws: int) -> list[list[int]]:
    """Indices of ``probs`` in bins of at least :data:`LEAST_EXPECTED` draws each; chosen without seeing any draw."""
    single = [index for index, prob in enumerate(probs) if prob * draws >= LEAST_EXPECTED]
    rest = [index for index, prob in enumerate(probs) if 0.0 < prob * draws < LEAST_EXPECTED]
    bins = [[index] for index in single]
    if not rest:
        return bins
    if sum(probs[index] for index in rest) * draws >= LEAST_EXPECTED or not bins:
        return [*bins, rest]
    return [*bins[:-1], [*bins[-1], *rest]]


def frequencies_of(probs: Sequence[float], drawn: Sequence[int]) -> Frequencies:
    """Counts of drawn indices of ``probs``, which sum to 1; an index without a place there is −1."""
    bins = binned(probs, len(drawn))
    place = {index: at for at, members in enumerate(bins) for index in members}
    observed = [0] * len(bins)
    outside = 0
    for index in drawn:
        if index in place:
            observed[place[index]] += 1
        else:
            outside += 1
    expected = [sum(probs[index] for index in members) * len(drawn) for members in bins]
    if outside:
        observed, expected = [*observed, outside], [*expected, 0.0]
    return Frequencies(tuple(observed), tuple(expected))
