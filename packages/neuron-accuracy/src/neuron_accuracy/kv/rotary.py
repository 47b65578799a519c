# SPDX-License-Identifier: Apache-2.0
"""Finding by how much two sets of rotated keys were rotated differently.

Rotary embedding (Su et al. 2021, arXiv:2104.09864) turns the plane of dimensions i and i + D/2 (the halves layout) by
``position * base ** (-2 i / D)``. Keys of the same model under another base are therefore each other's, turned by an
angle that is proportional to the position: the slope is fitted per plane, then two bases to the slopes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Rotation", "bases", "fit", "turn"]

_OVERSAMPLING = 8
_REFINEMENTS = 4


@dataclass(frozen=True, eq=False)
class Rotation:
    """How the test's keys are turned against the reference's."""

    slopes: torch.Tensor
    """Radians per position, float64 ``[D / 2]``."""
    residual: float
    """Relative L2 error that is left once the reference's keys are turned as well."""


def turn(keys: torch.Tensor, positions: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """``keys`` ``[heads, P, D]`` with plane i turned by ``positions * slopes[i]``, in their dtype."""
    angles = positions.double()[:, None] * slopes.double()
    cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)
    first, second = keys.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def fit(test: torch.Tensor, reference: torch.Tensor, positions: torch.Tensor) -> Rotation:
    """The slopes that turn ``reference`` into ``test``, both float32 ``[heads, P, D]``, nearest in the least squares.

    The product of a plane's complex numbers, one conjugated, has the angle of the turn; its largest frequency over the
    positions is the slope, first by FFT, then by a regression of what is left of the angles.
    """
    products = (_planes(test) * _planes(reference).conj()).sum(dim=0)
    length = int(positions.max()) + 1
    series = torch.zeros(length, products.shape[1], dtype=torch.complex128)
    series[positions] = products
    size = _OVERSAMPLING * length
    peaks = torch.fft.fft(series, n=size, dim=0).abs().argmax(dim=0).double()
    slopes = torch.where(peaks > size / 2, peaks - size, peaks) * (2 * torch.pi / size)
    places = positions.double()[:, None]
    for _ in range(_REFINEMENTS):
        left = products * torch.polar(torch.ones_like(places * slopes), -places * slopes)
        weight = left.abs()
        slopes = slopes + (weight * places * left.angle()).sum(0) / (weight * places**2).sum(0).clamp_min(
            1e-300
        )
    residual = (test - turn(reference, positions, slopes)).norm() / reference.norm().clamp_min(1e-30)
    return Rotation(slopes, float(residual))


def bases(slopes: torch.Tensor) -> tuple[float, float] | None:
    """The rotary bases of test and reference whose angles differ by ``slopes``, or None when no two bases do.

    Searched on a grid between 10 and 1e9, then by Gauss-Newton on their logarithms.
    """
    half = slopes.numel()
    exponents = -torch.arange(half, dtype=torch.float64) / half
    grid = torch.linspace(1, 9, 161, dtype=torch.float64) * torch.log(torch.tensor(10.0, dtype=torch.float64))
    angles = (grid[:, None] * exponents).exp()
    errors = (angles[:, None] - angles[None] - slopes).square().sum(dim=-1)
    best = int(errors.argmin())
    logs = torch.stack([grid[best // len(grid)], grid[best % len(grid)]])
    for _ in range(30):
        ours = (logs[:, None] * exponents).exp()
        slope = torch.stack([ours[0] * exponents, -ours[1] * exponents], dim=1)
        step = torch.linalg.lstsq(slope, slopes - (ours[0] - ours[1])).solution
        logs = (logs + step.clamp(-1, 1)).clamp(0.1, 25)
    ours = (logs[:, None] * exponents).exp()
    if (ours[0] - ours[1] - slopes).abs().max() > 0.05 * slopes.abs().max():
        return None
    return float(logs[0].exp()), float(logs[1].exp())


def _planes(keys: torch.Tensor) -> torch.Tensor:
    first, second = keys.double().chunk(2, dim=-1)
    return torch.complex(first, second)
