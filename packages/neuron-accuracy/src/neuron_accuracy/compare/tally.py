# SPDX-License-Identifier: Apache-2.0
"""Sums up how far one tensor of a run is from another run's, rows at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neuron_accuracy.compare.metrics import (
    LOG_BINS,
    ULP_LABELS,
    bhattacharyya,
    finite_or_zero,
    log_histogram,
    ratio,
    ulp_distance,
    ulp_histogram,
    without_masks,
)

__all__ = ["Channels", "Extreme", "Tally"]


@dataclass(frozen=True)
class Extreme:
    """One element, by where its row is from."""

    pair: int
    position: int
    channel: int
    test: float
    reference: float


class Channels:
    """Sums over rows for each channel, float64 ``[4, features]``: apart for even and odd positions of every other
    request. d is the difference and r the reference.
    """

    GROUPS = 4

    def __init__(self, features: int) -> None:
        zeros = [torch.zeros(self.GROUPS, features, dtype=torch.float64) for _ in range(7)]
        self.dr, self.dd, self.r, self.rr, self.rrrr, self.ddrr, self.drrr = zeros

    def add(self, d: Tensor, r: Tensor, pairs: Tensor, positions: Tensor) -> None:
        """Add rows ``[rows, features]``."""
        groups = torch.arange(self.GROUPS).unsqueeze(1)
        of = (groups == positions % 2 + 2 * (pairs % 2)).double()
        cross, square = d * r, r.square()
        self.dr += of @ cross
        self.dd += of @ d.square()
        self.r += of @ r
        self.rr += of @ square
        self.rrrr += of @ square.square()
        self.ddrr += of @ cross.square()
        self.drrr += of @ (cross * square)


@dataclass
class _Heads:
    """float64: ``dots[i, j]`` of the test's head i and the reference's head j, and squared norms ``[heads]``."""

    dots: Tensor
    test: Tensor
    reference: Tensor
    error: Tensor


@dataclass
class _Input:
    """Errors of one request against a baseline."""

    test: float = 0.0
    reference: float = 0.0
    test_max: float = 0.0
    reference_max: float = 0.0
    largest: float = 0.0
    """Of the baseline itself."""


@dataclass
class Tally:
    """Sums over rows of ``test`` against ``reference``, both ``[rows, features]``, and against a baseline of both if
    there is one. ``dtype`` is the one whose ulps are counted, None for integers.
    """

    features: int
    heads: int | None
    dtype: torch.dtype | None
    rows: int = 0
    dot: float = 0.0
    test_square: float = 0.0
    reference_square: float = 0.0
    error_square: float = 0.0
    reference_max: float = 0.0
    linf: float = 0.0
    linf_at: Extreme | None = None
    not_finite: int = 0
    not_finite_at: Extreme | None = None
    baseline_square: float = 0.0
    baseline_max: float = 0.0
    inputs: dict[int, _Input] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.channels = Channels(self.features)
        self._series = torch.zeros(0, 5, dtype=torch.float64)
        self.histograms = torch.zeros(2, LOG_BINS, dtype=torch.int64)
        self.ulps = torch.zeros(len(ULP_LABELS), dtype=torch.int64)
        self.by_head: _Heads | None = None
        if self.heads:
            dots = torch.zeros(self.heads, self.heads, dtype=torch.float64)
            self.by_head = _Heads(dots, *(torch.zeros(self.heads, dtype=torch.float64) for _ in range(3)))

    def add(
        self, test: Tensor, reference: Tensor, baseline: Tensor | None, pairs: Tensor, positions: Tensor
    ) -> None:
        """Add rows; ``pairs`` and ``positions`` are int64 ``[rows]``: which request each is of, and where in it."""
        wide = [tensor.double() for tensor in (test, reference, baseline) if tensor is not None]
        (t, r, *rest), bad = finite_or_zero(*wide)
        self._note_bad(bad, wide, pairs, positions)
        if self.dtype is not None:
            t, r, *rest = without_masks([t, r, *rest], self.dtype)
        error = _difference(t, r, test, reference)
        squares = error.square()
        begin, self.rows = self.rows, self.rows + t.shape[0]
        self.dot += float((t * r).sum())
        self.test_square += float(t.square().sum())
        row_reference, row_error = r.square().sum(1), squares.sum(1)
        self.reference_square += float(row_reference.sum())
        self.error_square += float(row_error.sum())
        self._note_largest(error, r, t, pairs, positions)
        self.channels.add(error, r, pairs, positions)
        if self.by_head is not None:
            self._add_heads(self.by_head, t, r, squares)
        if self.dtype is not None:
            self.ulps += ulp_histogram(ulp_distance(t, r, self.dtype))
        own = torch.zeros_like(row_error)
        if rest and baseline is not None:
            apart = _difference(t, rest[0], test, baseline), _difference(r, rest[0], reference, baseline)
            own = self._add_baseline(*apart, rest[0], pairs)
        else:
            self.histograms += torch.stack([log_histogram(t), log_histogram(r)])
        self._room(self.rows)[begin : self.rows] = torch.stack(
            [pairs.double(), positions.double(), row_error, row_reference, own], 1
        )

    @property
    def cosine(self) -> float:
        """Of all elements as one vector; 1 of two that are zero."""
        norms = math.sqrt(self.test_square * self.reference_square)
        if not norms:
            return 1.0 if self.test_square == self.reference_square else 0.0
        return self.dot / norms

    @property
    def rel_l2(self) -> float:
        """Norm of the difference by the norm of the reference."""
        return ratio(math.sqrt(self.error_square), math.sqrt(self.reference_square))

    @property
    def even_l2(self) -> float:
        """As ``rel_l2``, each channel counting alike: the root mean square of what it is of each."""
        error, reference = self.channels.dd.sum(0), self.channels.rr.sum(0)
        known = reference > 0
        return math.sqrt(float((error[known] / reference[known]).mean())) if bool(known.any()) else 0.0

    @property
    def linf_rel(self) -> float:
        """Largest difference by the largest magnitude of the reference."""
        return ratio(self.linf, self.reference_max)

    @property
    def bc(self) -> float:
        """Bhattacharyya coefficient: of the errors against a baseline if there is one, else of the values."""
        return bhattacharyya(self.histograms[0], self.histograms[1])

    def sigma_ratio(self, floor: float) -> float:
        """Root mean square of the test's errors against the baseline by that of the reference's, which counts as at
        least ``floor`` of the baseline's.
        """
        test = sum(item.test for item in self.inputs.values())
        reference = sum(item.reference for item in self.inputs.values())
        return ratio(math.sqrt(test), max(math.sqrt(reference), floor * math.sqrt(self.baseline_square)))

    def worst_ratios(self, floor: float, rounding: float) -> tuple[float, float]:
        """``(L-infinity, L2)`` ratios of the test's errors to the reference's, of the worst request.

        The reference's count as at least ``floor`` of the baseline's size and ``rounding`` of its largest element:
        where a few elements outweigh all others, what the reference's rounding happened to lose of them says nothing.
        """
        least_max = floor * self.baseline_max
        least = floor * math.sqrt(self.baseline_square / max(1, len(self.inputs)))
        linf, norms = 0.0, 0.0
        for item in self.inputs.values():
            one = rounding * item.largest
            linf = max(linf, ratio(item.test_max, max(item.reference_max, least_max, one)))
            norms = max(norms, ratio(math.sqrt(item.test), max(math.sqrt(item.reference), least, one)))
        return linf, norms

    def by_row(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """``(pair, position, error, reference, reference's own error)`` of all rows, the last three squared norms."""
        pairs, positions, *squares = self._series[: self.rows].unbind(1)
        return pairs.long(), positions.long(), squares[0], squares[1], squares[2]

    def _room(self, rows: int) -> Tensor:
        """Doubled when full: a small tensor kept of each piece would pin the memory of large ones freed around it."""
        if rows > len(self._series):
            grown = torch.zeros(max(1024, 2 * rows), 5, dtype=torch.float64)
            grown[: len(self._series)] = self._series
            self._series = grown
        return self._series

    def _note_bad(self, bad: Tensor, wide: list[Tensor], pairs: Tensor, positions: Tensor) -> None:
        count = int(bad.sum())
        if count and self.not_finite_at is None:
            row, channel = (int(index) for index in bad.nonzero()[0])
            self.not_finite_at = Extreme(
                int(pairs[row]),
                int(positions[row]),
                channel,
                float(wide[0][row, channel]),
                float(wide[1][row, channel]),
            )
        self.not_finite += count

    def _note_largest(self, error: Tensor, r: Tensor, t: Tensor, pairs: Tensor, positions: Tensor) -> None:
        if not error.numel():
            return
        self.reference_max = max(self.reference_max, float(r.abs().max()))
        flat = int(error.abs().argmax())
        row, channel = divmod(flat, error.shape[1])
        largest = abs(float(error[row, channel]))
        if largest > self.linf:
            self.linf = largest
            self.linf_at = Extreme(
                int(pairs[row]),
                int(positions[row]),
                channel,
                float(t[row, channel]),
                float(r[row, channel]),
            )

    def _add_heads(self, sums: _Heads, t: Tensor, r: Tensor, squares: Tensor) -> None:
        shape = (t.shape[0], sums.test.shape[0], -1)
        t, r = t.reshape(shape), r.reshape(shape)
        sums.dots += torch.einsum("nhd,nkd->hk", t, r)
        sums.test += t.square().sum((0, 2))
        sums.reference += r.square().sum((0, 2))
        sums.error += squares.reshape(shape).sum((0, 2))

    def _add_baseline(self, test: Tensor, reference: Tensor, baseline: Tensor, pairs: Tensor) -> Tensor:
        self.histograms += torch.stack([log_histogram(test), log_histogram(reference)])
        self.baseline_square += float(baseline.square().sum())
        self.baseline_max = max(self.baseline_max, float(baseline.abs().max()) if baseline.numel() else 0.0)
        own = reference.square().sum(1)
        for pair in pairs.unique().tolist():
            here = pairs == pair
            item = self.inputs.setdefault(pair, _Input())
            item.test += float(test[here].square().sum())
            item.reference += float(own[here].sum())
            item.test_max = max(item.test_max, float(test[here].abs().max()))
            item.reference_max = max(item.reference_max, float(reference[here].abs().max()))
            item.largest = max(item.largest, float(baseline[here].abs().max()))
        return own


def _difference(first: Tensor, second: Tensor, narrow: Tensor, other: Tensor) -> Tensor:
    """``first - second``; of integers at least one where they differ, whatever float64 makes of large ones."""
    difference = first - second
    if narrow.is_floating_point() or other.is_floating_point():
        return difference
    unlike = narrow.long() != other.long()
    return torch.where(unlike & (difference == 0), 1.0, difference)
