# SPDX-License-Identifier: Apache-2.0
"""Whether a test's errors look like those of its dtype: the three-way comparison.

Base errors are those of the reference in the target dtype, test errors those of the run under test, both against a
baseline of higher precision. A row's mean error is taken off first: a softmax does not see it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

__all__ = ["BC_LIMIT", "L2_GATE", "LINF_GATE", "SIGMA_LIMIT", "TOKEN_RATIO", "Noise", "centred"]

SIGMA_LIMIT = 1.0
BC_LIMIT = 0.99
TOKEN_RATIO = 1.5
"""A row whose error is more than this many times the base's is told of; that alone fails nothing."""
LINF_GATE = 5.0
L2_GATE = 3.0
"""The gates of the reference's module tests. A prompt beyond them is not excused by what all prompts are together,
among which one bad prompt of many would be lost."""

_PER_OCTAVE = 4
_OCTAVES = (-40, 24)
_SIDE = _PER_OCTAVE * (_OCTAVES[1] - _OCTAVES[0])


def centred(errors: torch.Tensor) -> torch.Tensor:
    """Errors ``[n, m]`` without their row's mean."""
    return errors - errors.mean(dim=1, keepdim=True)


@dataclass
class Noise:
    """Sums over rows of errors; two of them add up to that of all rows.

    The Bhattacharyya coefficient is Σ √(pᵢ qᵢ) over the shares of base and test errors in intervals of equal ratio, a
    quarter of an octave wide, of either sign: they need no scale known before, so that sums of prompts can be added.
    """

    base_count: int = 0
    test_count: int = 0
    base_squares: float = 0.0
    test_squares: float = 0.0
    base_worst: float = 0.0
    test_worst: float = 0.0
    base_shares: torch.Tensor = field(default_factory=lambda: torch.zeros(2 * _SIDE + 1, dtype=torch.float64))
    test_shares: torch.Tensor = field(default_factory=lambda: torch.zeros(2 * _SIDE + 1, dtype=torch.float64))

    @classmethod
    def of(cls, base: torch.Tensor, test: torch.Tensor) -> Noise:
        """The sums of centred errors ``[n, m]``."""
        return cls(
            base_count=base.numel(),
            test_count=test.numel(),
            base_squares=float(base.double().square().sum()),
            test_squares=float(test.double().square().sum()),
            base_worst=float(base.abs().max()) if base.numel() else 0.0,
            test_worst=float(test.abs().max()) if test.numel() else 0.0,
            base_shares=_shares(base),
            test_shares=_shares(test),
        )

    def __add__(self, other: Noise) -> Noise:
        return Noise(
            self.base_count + other.base_count,
            self.test_count + other.test_count,
            self.base_squares + other.base_squares,
            self.test_squares + other.test_squares,
            max(self.base_worst, other.base_worst),
            max(self.test_worst, other.test_worst),
            self.base_shares + other.base_shares,
            self.test_shares + other.test_shares,
        )

    @property
    def sigma_ratio(self) -> float:
        """Standard deviation of test errors over that of base errors; their L2 ratio too, as both are centred."""
        if not self.base_count or not self.test_count:
            return 1.0
        return ratio(
            math.sqrt(self.test_squares / self.test_count), math.sqrt(self.base_squares / self.base_count)
        )

    @property
    def linf_ratio(self) -> float:
        """Greatest test error over greatest base error."""
        return ratio(self.test_worst, self.base_worst)

    @property
    def bhattacharyya(self) -> float:
        """1 if test errors are distributed as base errors, 0 if they share no value."""
        if not self.base_count or not self.test_count:
            return 1.0
        both = (self.base_shares * self.test_shares).sqrt().sum()
        return float(both) / math.sqrt(self.base_count * self.test_count)

    @property
    def alike(self) -> bool:
        """Whether the errors are no greater, or distributed as, those of the dtype."""
        return self.sigma_ratio <= SIGMA_LIMIT or self.bhattacharyya >= BC_LIMIT

    @property
    def beyond_gates(self) -> bool:
        """Whether they are too great for any excuse."""
        return self.linf_ratio >= LINF_GATE or self.sigma_ratio >= L2_GATE


def ratio(test: float, base: float) -> float:
    """Test over base; two zeros are equal."""
    if base == 0.0:
        return 1.0 if test == 0.0 else math.inf
    return test / base


def _shares(errors: torch.Tensor) -> torch.Tensor:
    flat = errors.flatten()
    place = (flat.abs().clamp_min(1e-30).log2() - _OCTAVES[0]).mul(_PER_OCTAVE).floor().long()
    place = place.clamp(-1, _SIDE - 1) + 1
    index = _SIDE + place * flat.sign().long()
    return torch.bincount(index, minlength=2 * _SIDE + 1).double()
