# SPDX-License-Identifier: Apache-2.0
"""Which of all findings is to be looked at first."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_accuracy.findings import Finding, Level, Outcome

__all__ = ["first_to_look_at"]

UNEXPLAINED = "diverges"
"""The kind of a finding that says that, but not why."""


def first_to_look_at(outcomes: Sequence[Outcome]) -> Finding | None:
    """The fault that says most narrowly what is wrong, or None if there is none.

    What was wrong with the input comes first: it makes the rest doubtful. Then a cache whose fault has a name, since
    what reads it only inherits it; then the first module to part; then the wider levels.
    """
    faults = [finding for outcome in outcomes for finding in outcome.faults]
    orders = (
        [f for f in faults if f.level is Level.INPUT],
        [f for f in faults if f.level is Level.KV and f.kind != UNEXPLAINED],
        [f for f in faults if f.level is Level.TENSOR],
        [f for f in faults if f.level is Level.KV],
        [f for f in faults if f.level is Level.SAMPLING],
        [f for f in faults if f.level is Level.PROMPT],
        faults,
    )
    return next((held[0] for held in orders if held), None)
