# SPDX-License-Identifier: Apache-2.0
"""How far logits may part: limits by rank of the token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuron_core.errors import ConfigError

__all__ = ["ALL", "FLOAT32", "HALF", "Limits", "parse_limits"]

ALL = 0
"""In the place of k: every token there is."""


@dataclass(frozen=True)
class Limits:
    """For the k likeliest tokens of a row each, the greatest |test − reference| allowed: ``atol + relative · scale``.

    ``scale`` is the greatest magnitude in the reference's row, masked columns left out (``pairs.Pairs.scale``): the
    error is relative to the row, not to the single logit, which may be zero. The less likely a token, the less its
    logit matters, so limits grow with k. If there are fewer than k tokens, a limit holds for those there are.
    """

    relative: Mapping[int, float]
    atol: float = 1e-5

    @property
    def names(self) -> dict[int, str]:
        """How each k is written."""
        return {k: "all" if k == ALL else str(k) for k in self.relative}


HALF = Limits({5: 0.011, 50: 0.02, 1000: 0.03, ALL: 0.05})
"""The reference's limits (its page on logit validation), made for bfloat16 against float32."""

FLOAT32 = Limits({k: limit / 100 for k, limit in HALF.relative.items()})
"""Where both compute in float32. Another order of sums moves a real model's logits by about 2e-6 of the row's greatest:
a hundredth of the limits for bfloat16 leaves a margin of fifty, and a fault smaller than rounding to bfloat16 shows."""


def parse_limits(setting: str, text: str) -> Limits:
    """Limits from ``5=0.011,50=0.02,all=0.05``; raises ``ConfigError``."""
    relative: dict[int, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            k, limit = ALL if name == "all" else int(name), float(value)
        except ValueError:
            raise ConfigError(setting, text, "must be K=LIMIT,…; 5=0.011,50=0.02,all=0.05 works") from None
        if k < 0 or (k == ALL and name != "all") or not limit >= 0:
            raise ConfigError(setting, text, f"{part.strip()!r} is no limit; 5=0.011 works")
        relative[k] = limit
    return Limits(relative)
