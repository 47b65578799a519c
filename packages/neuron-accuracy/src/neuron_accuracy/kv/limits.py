# SPDX-License-Identifier: Apache-2.0
"""How far two caches may be apart and still agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from neuron_accuracy.errors import AccuracyError

__all__ = ["BASELINE_RATIO", "POSITION_FACTOR", "REFERENCE_FACTOR", "RELATIVE_L2", "Limits", "limits_for"]

RELATIVE_L2 = {
    "float64": 1e-4,
    "float32": 1e-4,
    "float16": 0.00625,
    "bfloat16": 0.05,
    "float8_e4m3fn": 0.1,
    "float8_e5m2": 0.2,
}
"""Relative L2 error of a head over all positions, by the coarsest dtype of model and cache on either side.

* ``float32``: sums in another order differ by some 1e-6, which tens of layers amplify to 1e-5; a real fault is rarely
  below 1e-3. ``float64`` the same: it is compared in float32.
* ``bfloat16`` keeps 8 bits, so that rounding errs by up to 2^-8 and by 0.0016 in the mean square. The residual stream
  is rounded about twice a layer; errors of random sign grow with the root, to 1.2 % over 30 layers and, between two
  runs that both round, to 1.8 %. 5 % would take some 200 layers.
* ``float16`` keeps three bits more: an eighth of that.
* ``float8_e4m3fn`` keeps 4 bits: storing adds 2.6 % in the mean square, 3.7 % between two caches, beside the 5 % of the
  bfloat16 computation; ``float8_e5m2`` one bit less, so twice as much.
"""

POSITION_FACTOR = 3.0
"""A single position of a head may be this many times farther off than the head: it averages over fewer numbers, and the
tokens of a text are not equally well conditioned. Also the published gate of the relative error against a baseline."""

BASELINE_RATIO = 1.5
"""With a baseline of higher precision: how many times farther from it than the reference the test may be."""


REFERENCE_FACTOR = 5.0
"""How many times the limit of a head the reference itself may be from the baseline, before it is none: a rounding can
grow from layer to layer, and the test's may then grow as well."""


@dataclass(frozen=True)
class Limits:
    """The largest relative L2 errors that pass."""

    head: float
    """Of a head over all positions."""
    position: float
    """Of one position of a head, relative to the larger of its own norm and the median of the head's."""


def limits_for(dtypes: Iterable[str]) -> Limits:
    """The limits of the coarsest of these dtypes, ``unknown`` left out; raises ``AccuracyError`` when none is known."""
    named = {dtype.removeprefix("torch.") for dtype in dtypes} - {"unknown"}
    known = [RELATIVE_L2[dtype] for dtype in named if dtype in RELATIVE_L2]
    if strange := sorted(named - set(RELATIVE_L2)):
        raise AccuracyError(
            f"no limits for a cache of {', '.join(strange)}; known are {', '.join(RELATIVE_L2)}"
        )
    if not known:
        raise AccuracyError(f"no dtype of model or cache is known; known are {', '.join(RELATIVE_L2)}")
    return Limits(max(known), POSITION_FACTOR * max(known))
