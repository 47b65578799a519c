# SPDX-License-Identifier: Apache-2.0
"""Limits of all levels, by what the compared runs are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuron_accuracy.compare import limits as tensor_limits
from neuron_accuracy.logits import limits as logit_limits

if TYPE_CHECKING:
    from neuron_accuracy.run.triage import Roles

__all__ = ["EIGHT_BIT_LOGITS", "RunLimits", "limits_of"]

EIGHT_BIT_LOGITS = logit_limits.Limits({k: limit * 8 for k, limit in logit_limits.HALF.relative.items()})
"""A cache of 8-bit floats keeps 4 of bfloat16's 8 significant bits or fewer: errors of one rounding are 8 to 16 times
as large.
"""


@dataclass(frozen=True)
class RunLimits:
    """None leaves a level its own."""

    logits: logit_limits.Limits | None = None
    tensors: tensor_limits.Limits | None = None
    one_reference: bool = False
    """Whether the test is held against the most precise run alone: no reference shares what its precision lacks."""


def limits_of(roles: Roles) -> RunLimits:
    """For a test with an 8-bit KV cache, whose reference has none, those of that dtype; else each level's own."""
    cache = roles.test.info().cache_dtype
    if not cache.startswith("float8"):
        return RunLimits()
    coarse = tensor_limits.TWO_WAY[cache]
    widened = dict.fromkeys(tensor_limits.TWO_WAY, coarse)
    return RunLimits(EIGHT_BIT_LOGITS, tensor_limits.Limits(two_way=widened), one_reference=True)
