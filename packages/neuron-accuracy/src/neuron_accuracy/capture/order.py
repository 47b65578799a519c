# SPDX-License-Identifier: Apache-2.0
"""One order of modules from the orders of several steps, no one of which need have them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["merge_order"]


def merge_order(runs: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """All names, in the first order's order; what a later one adds stands behind what it followed there."""
    merged: list[str] = []
    for run in runs:
        known = set(merged)
        place = 0
        for name in run:
            if name in known:
                place = merged.index(name) + 1
            else:
                merged.insert(place, name)
                place += 1
    return tuple(merged)
