# SPDX-License-Identifier: Apache-2.0
"""Measures of how far tensors are apart that can be summed up piece by piece."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "LOG_BINS",
    "ULP_LABELS",
    "bhattacharyya",
    "coarser",
    "finite_or_zero",
    "log_histogram",
    "ratio",
    "ulp_distance",
    "ulp_histogram",
    "without_masks",
]

_OCTAVES = 64
_PER_OCTAVE = 2
_HALF = 2 * _OCTAVES * _PER_OCTAVE
LOG_BINS = 2 * _HALF + 1
"""Half octaves from 2^-64 to 2^64 of either sign, and zero."""

_ULP_EDGES = (0, 1, 2, 4, 8, 16, 64)
ULP_LABELS = ("0", "1", "2", "3–4", "5–8", "9–16", "17–64", "> 64")

_MOST_ULPS = 2**62 - 1

_MASK = 1e6
"""A score that is masked out by a large finite number is at least so large; no activation or logit is."""
_BEYOND = 1e3
"""And so many times larger than what is not masked out of its row."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def log_histogram(values: Tensor) -> Tensor:
    """Counts int64 ``[LOG_BINS]`` of finite values by sign and half octave, so that no range need be known before."""
    magnitude = values.abs()
    octave = (magnitude.log2() * _PER_OCTAVE).floor_().clamp_(-_HALF // 2, _HALF // 2 - 1) + (_HALF // 2 + 1)
    index = torch.where(magnitude == 0, 0.0, octave * values.sign()) + _HALF
    return torch.bincount(index.long().flatten(), minlength=LOG_BINS)


def bhattacharyya(first: Tensor, second: Tensor) -> float:
    """Overlap of two histograms, 0 to 1: the sum of ``sqrt(p q)`` over their shares p and q of each bin.

    Two samples of one distribution overlap less than wholly, by ``(K - 1) / 8 (1 / n + 1 / m)`` in the mean for K bins
    in use and n and m values (second-order expansion of the multinomial mean); that much is added, up to 1.
    """
    n, m = float(first.sum()), float(second.sum())
    if not n or not m:
        return 1.0 if n == m else 0.0
    overlap = float((first.double() * second.double()).sqrt().sum()) / math.sqrt(n * m)
    used = int(((first > 0) | (second > 0)).sum())
    lost = (used - 1) / 8 * (1 / n + 1 / m)
    return min(1.0, overlap + lost) if overlap else 0.0


def ulp_distance(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """How many values of ``dtype`` lie between two tensors, both rounded to it first: int64, at most 2^63 - 2."""
    a, b = _ordered(first.to(dtype)), _ordered(second.to(dtype))
    # Of either sign, float64 has more values than int64 can count.
    across = a.abs().clamp_max(_MOST_ULPS) + b.abs().clamp_max(_MOST_ULPS)
    return torch.where((a < 0) == (b < 0), (a - b).abs(), across)


def ulp_histogram(distances: Tensor) -> Tensor:
    """Counts int64 of distances in the ranges of ``ULP_LABELS``."""
    edges = torch.tensor(_ULP_EDGES)
    return torch.bincount(torch.bucketize(distances.flatten(), edges), minlength=len(ULP_LABELS))


def coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The one of two dtypes with the larger rounding error; integers round nothing."""
    floating = [dtype for dtype in (first, second) if dtype.is_floating_point]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps) if floating else first


def finite_or_zero(*tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    """The tensors with zero wherever one of them is not finite, and where that is; an infinity that all share, as of a
    masked score, is no such place, but becomes zero too.
    """
    finite = torch.stack([tensor.isfinite() for tensor in tensors]).all(0)
    if bool(finite.all()):
        return list(tensors), torch.zeros_like(finite)
    shared = tensors[0].isinf()
    for tensor in tensors[1:]:
        shared = shared & (tensor == tensors[0])
    return [torch.where(finite, tensor, 0.0) for tensor in tensors], ~finite & ~shared


def without_masks(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors ``[rows, features]`` with zero where all mask an element out: by a number that is huge in all of
    them, the same to a rounding of ``dtype``, and far beyond the rest of its row.

    ``finfo.min`` and -1e9 stand for minus infinity; as the largest element they would let every other be anything.
    What only one of them masks stays, and is an error as large as it. What is equal is left out only, so that nothing
    is excused.
    """
    least = min(_MASK, torch.finfo(dtype).max)
    # In 8 bits the largest number is a value like others.
    if dtype.itemsize < 2 or not tensors[0].numel():
        return list(tensors)
    if min(float(tensor.abs().max()) for tensor in tensors) < least:
        return list(tensors)
    first = tensors[0]
    huge = torch.ones_like(first, dtype=torch.bool)
    for tensor in tensors:
        huge &= (tensor.abs() >= least) & ((tensor - first).abs() <= torch.finfo(dtype).eps * first.abs())
    rest = torch.stack([torch.where(huge, 0.0, tensor.abs()).amax(1) for tensor in tensors]).amax(0)
    huge &= first.abs() >= _BEYOND * rest.unsqueeze(1)
    return [torch.where(huge, 0.0, tensor) for tensor in tensors]


def ratio(value: float, reference: float) -> float:
    """``value / reference``; 0 of nothing is 0, and anything else of nothing infinite."""
    if reference:
        return value / reference
    return math.inf if value else 0.0


def _ordered(values: Tensor) -> Tensor:
    """Integers in the order of the floating-point values, neighbours one apart; both zeros are 0."""
    size = values.element_size()
    bits = values.contiguous().view(_INTEGERS[size]).long()
    magnitude = bits & ((1 << (8 * size - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)
