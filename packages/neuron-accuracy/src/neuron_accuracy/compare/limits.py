# SPDX-License-Identifier: Apache-2.0
"""What two runs may be apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

__all__ = ["TWO_WAY", "Gates", "Limits", "TwoWay"]


@dataclass(frozen=True)
class TwoWay:
    """Without a baseline: limits by the coarsest of the dtypes that a tensor is stored in and its runs compute in: what
    a run in 16 bits stores in 32 is no more exact for that.
    """

    rel_l2: float
    """Norm of the difference by the norm of the reference, over all rows."""
    linf_rel: float
    """Largest difference by the largest magnitude of the reference."""
    row: float
    """Norm of one row's difference by the norm of the reference's row, or of the median row if that is larger."""
    head: float
    """As ``rel_l2``, of one head."""
    gain: float
    """How far from 1 the slope of one channel on the reference's may be, if that is no chance."""
    made: float
    """What one module may add: its ``rel_l2`` may be this and a few times its input's."""


TWO_WAY: Mapping[str, TwoWay] = {
    "float64": TwoWay(1e-6, 1e-5, 1e-5, 1e-5, 1e-6, 1e-10),
    "float32": TwoWay(1e-3, 5e-3, 5e-3, 5e-3, 1e-4, 2e-5),
    "float16": TwoWay(0.03, 0.1, 0.1, 0.1, 2e-3, 2e-3),
    "bfloat16": TwoWay(0.12, 0.3, 0.4, 0.4, 8e-3, 15e-3),
    "float8_e4m3fn": TwoWay(0.3, 0.5, 0.6, 0.6, 0.05, 0.1),
    "float8_e5m2": TwoWay(0.4, 0.6, 0.8, 0.8, 0.1, 0.2),
}
"""A whole model's depth of rounding stays well below; what one module adds is judged against its input as well."""

EXACT = TwoWay(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Integers and truth values."""


@dataclass(frozen=True)
class Gates:
    """With a baseline of higher precision: the test's error against the reference's, as published for vllm-neuron:
    passes if the distributions of errors agree or the test's are no larger, and nothing stands out.
    """

    bc: float = 0.99
    """Least Bhattacharyya coefficient of both errors' histograms, unless …"""
    sigma: float = 1.0
    """… the root mean square of the test's errors is at most this times the reference's."""
    linf_ratio: float = 5.0
    """Below which the largest error must stay, by the reference's largest, of the worst input."""
    l2_ratio: float = 3.0
    """Below which the norm of the error must stay, by the norm of the reference's, of the worst input."""

    def passes(self, bc: float, sigma: float, linf_ratio: float, l2_ratio: float) -> bool:
        """Whether these figures pass; one that is no number does not."""
        alike = bc >= self.bc or sigma <= self.sigma
        return alike and linf_ratio < self.linf_ratio and l2_ratio < self.l2_ratio


@dataclass(frozen=True)
class Limits:
    """All limits of a comparison of captures."""

    two_way: Mapping[str, TwoWay] = field(default_factory=lambda: TWO_WAY)
    gates: Gates = Gates(sigma=1.5)
    """Two implementations that round differently have errors of one size, not of one distribution: 1.5, the published
    limit for captures, instead of the 1.0 for a single module.
    """
    chance: float = 3.0
    """Where test and reference are within the two-way limits of each other, a tensor passes up to this sigma ratio
    whatever the other gates say: of hundreds whose size a few elements decide, some have a reference that was lucky.
    """
    growth: float = 3.0
    """How many times its input's error a module may add to :attr:`TwoWay.made`; and how many times more than is usual
    for the modules of its kind in other layers its error may grow.
    """
    gain_z: float = 8.0
    """How many of its standard errors the slope of a channel must be from 1, and how many times further out than those
    of the tensor's other channels.
    """

    def of(self, dtype: torch.dtype) -> TwoWay:
        """The two-way limits where the coarser dtype is this one."""
        return self.two_way.get(str(dtype).removeprefix("torch."), EXACT)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form, for a report to state."""
        return {
            "two_way": {name: asdict(item) for name, item in self.two_way.items()},
            "gates": asdict(self.gates),
            "chance": self.chance,
            "growth": self.growth,
            "gain_z": self.gain_z,
        }
