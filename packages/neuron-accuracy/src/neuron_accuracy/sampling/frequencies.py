# SPDX-License-Identifier: Apache-2.0
"""Whether counts are draws from a known distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

__all__ = ["LEAST_EXPECTED", "Frequencies", "binned", "false_alarm_bound", "frequencies_of"]

LEAST_EXPECTED = 5.0
"""Tokens expected fewer times than this are counted together."""


@dataclass(frozen=True)
class Frequencies:
    """Counts beside what a distribution expects."""

    observed: tuple[int, ...]
    expected: tuple[float, ...]
    told_apart: int = 0
    """Outcomes expected at least :data:`LEAST_EXPECTED` times, whatever was drawn."""

    @property
    def chi_square(self) -> float:
        """Pearson's statistic."""
        pairs = zip(self.observed, self.expected, strict=True)
        return sum(
            (count - mean) ** 2 / mean if mean else (math.inf if count else 0.0) for count, mean in pairs
        )

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
    if degrees <= 0 or excess <= degrees:
        return 1.0
    return math.exp(-excess + degrees * (1.0 + math.log(excess / degrees)))


def binned(probs: Sequence[float], draws: int) -> list[list[int]]:
    """Indices of ``probs`` in bins of at least :data:`LEAST_EXPECTED` draws each; chosen without seeing any draw.

    Tokens too unlikely for a bin of their own are one together, or two where there is no other. Beside a single bin
    they are one however few: one bin shows nothing, and :func:`false_alarm_bound` holds for any.
    """
    single = [index for index, prob in enumerate(probs) if prob * draws >= LEAST_EXPECTED]
    rest = [index for index, prob in enumerate(probs) if 0.0 < prob * draws < LEAST_EXPECTED]
    bins = [[index] for index in single]
    if not rest:
        return bins
    if not bins:
        return _halved(probs, rest, draws)
    if len(bins) == 1 or sum(probs[index] for index in rest) * draws >= LEAST_EXPECTED:
        return [*bins, rest]
    return [*bins[:-1], [*bins[-1], *rest]]


def _halved(probs: Sequence[float], rest: list[int], draws: int) -> list[list[int]]:
    sums = list(accumulate(probs[index] for index in rest))
    cut = next(at for at, total in enumerate(sums, start=1) if total >= sums[-1] / 2)
    if min(sums[cut - 1], sums[-1] - sums[cut - 1]) * draws < LEAST_EXPECTED:
        return [rest]
    return [rest[:cut], rest[cut:]]


def frequencies_of(
    probs: Sequence[float], drawn: Sequence[int], between: tuple[float, float] = (0.0, 0.0)
) -> Frequencies:
    """Counts of drawn indices of ``probs``, which sum to 1; an index without a place there is −1.

    ``len(probs)`` is the index of one more outcome, of which no more is known than the least and the most share it has.
    It is expected as often as it came, as far as that share allows; the others in proportion. n · KL to these is the
    least to any distribution allowed (KL(x ‖ u) of a share has its minimum where u is nearest to x), so it is at most
    that to the true one, and :func:`false_alarm_bound` holds for it as it does for that: a profile likelihood
    ratio, see S. S. Wilks, Ann. Math. Statist. 9 (1938). Bins are chosen for the most share, without seeing any draw.
    """
    draws, (least, most) = len(drawn), between
    share = min(max(drawn.count(len(probs)) / max(draws, 1), least), most)
    bins = binned([prob * (1.0 - most) for prob in probs], draws)
    place = {index: at for at, members in enumerate(bins) for index in members}
    expected = [sum(probs[index] for index in members) * (1.0 - share) * draws for members in bins]
    shares = [sum(probs[index] for index in members) * (1.0 - most) for members in bins]
    told_apart = sum(part * draws >= LEAST_EXPECTED for part in (*shares, least))
    if most > 0.0:
        place[len(probs)] = len(bins)
        expected.append(share * draws)
    observed = [0] * len(expected)
    outside = 0
    for index in drawn:
        if index in place:
            observed[place[index]] += 1
        else:
            outside += 1
    if outside:
        observed, expected = [*observed, outside], [*expected, 0.0]
    return Frequencies(tuple(observed), tuple(expected), told_apart)
