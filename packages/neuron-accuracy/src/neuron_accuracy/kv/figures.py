# SPDX-License-Identifier: Apache-2.0
"""How far one layer's keys or values are from a reference's, by head and by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["METRICS", "Figures", "Sums", "bhattacharyya", "measure", "sums"]

METRICS = ("cosine", "relative_l2", "relative_linf", "bhattacharyya", "gain")
_BINS = 64


@dataclass(frozen=True, eq=False)
class Sums:
    """What the metrics are made of; sums of two sets of positions add up. Float64 ``[heads]`` each."""

    test: torch.Tensor
    """Of the test's squares."""
    reference: torch.Tensor
    cross: torch.Tensor
    """Of the products."""
    difference: torch.Tensor
    """Of the squared differences."""
    largest: torch.Tensor
    """Largest absolute difference."""
    scale: torch.Tensor
    """Largest absolute number of the reference."""
    overlap: torch.Tensor
    """Bhattacharyya coefficient times the number of positions."""
    count: int
    """Positions."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.test + other.test,
            self.reference + other.reference,
            self.cross + other.cross,
            self.difference + other.difference,
            torch.maximum(self.largest, other.largest),
            torch.maximum(self.scale, other.scale),
            self.overlap + other.overlap,
            self.count + other.count,
        )

    def metrics(self) -> dict[str, torch.Tensor]:
        """Each of ``METRICS``, float64 ``[heads]``. ``gain`` is the slope of the least-squares line through 0.

        Against a reference of zeros the relative ones are infinite, or 0 if the test is zero as well.
        """
        both_zero = (self.test == 0) & (self.reference == 0)
        return {
            "cosine": _ratio(self.cross, (self.test * self.reference).sqrt(), both_zero, 1.0, 0.0),
            "relative_l2": _ratio(self.difference.sqrt(), self.reference.sqrt(), both_zero, 0.0, torch.inf),
            "relative_linf": _ratio(self.largest, self.scale, both_zero, 0.0, torch.inf),
            "bhattacharyya": self.overlap / self.count,
            "gain": _ratio(self.cross, self.reference, both_zero, 1.0, torch.inf),
        }


@dataclass(frozen=True, eq=False)
class Figures:
    """One layer's keys or values over the positions that both sides hold."""

    sums: Sums
    by_position: torch.Tensor
    """L2 error of each position, relative to the larger of the reference's norm there and the median of its norms over
    the head's positions, float64 ``[heads, P]``. The median, because keys of an attention sink, often the first token,
    are hundreds of times larger than the others: a mean that one row makes would hide errors of all others."""

    @property
    def relative_l2(self) -> torch.Tensor:
        """Float64 ``[heads]``."""
        return self.sums.metrics()["relative_l2"]


def measure(test: torch.Tensor, reference: torch.Tensor) -> Figures:
    """Compare float32 ``[heads, P, D]``; every number is finite and P at least 1."""
    squares = (test - reference).double().square().sum(dim=-1)
    norms = reference.double().square().sum(dim=-1)
    floor = torch.maximum(norms, norms.median(dim=1, keepdim=True).values)
    by_position = _ratio(squares.sqrt(), floor.sqrt(), squares == 0, 0.0, torch.inf)
    return Figures(sums(test, reference), by_position)


def sums(test: torch.Tensor, reference: torch.Tensor) -> Sums:
    """The sums over all positions of float32 ``[heads, P, D]``."""
    ours, theirs = test.double().flatten(1), reference.double().flatten(1)
    return Sums(
        ours.square().sum(dim=1),
        theirs.square().sum(dim=1),
        (ours * theirs).sum(dim=1),
        (ours - theirs).square().sum(dim=1),
        (ours - theirs).abs().amax(dim=1),
        theirs.abs().amax(dim=1),
        bhattacharyya(test.flatten(1), reference.flatten(1)) * test.shape[1],
        test.shape[1],
    )


def bhattacharyya(test: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Overlap of the distributions of two rows of numbers, float64 ``[rows]`` between 0 and 1.

    Sum of the roots of the products of two histograms of 64 equal bins over the range of both (Bhattacharyya 1943).
    """
    low = torch.minimum(test.amin(dim=1), reference.amin(dim=1))[:, None]
    high = torch.maximum(test.amax(dim=1), reference.amax(dim=1))[:, None]
    width = ((high - low) / _BINS).clamp_min(torch.finfo(test.dtype).tiny)
    shares = []
    for rows in (test, reference):
        bins = ((rows - low) / width).floor().clamp(0, _BINS - 1).long()
        ones = torch.ones_like(bins, dtype=torch.float64)
        shares.append(
            torch.zeros(len(rows), _BINS, dtype=torch.float64).scatter_add(1, bins, ones) / rows.shape[1]
        )
    return (shares[0] * shares[1]).sqrt().sum(dim=1)


def _ratio(
    above: torch.Tensor, below: torch.Tensor, both_zero: torch.Tensor, equal: float, unbounded: float
) -> torch.Tensor:
    ratio = torch.where(below > 0, above / below.clamp_min(1e-300), unbounded)
    return torch.where(both_zero, equal, ratio)
