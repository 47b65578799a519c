# SPDX-License-Identifier: Apache-2.0
"""Where two greedy generations part, and whether a coin decided it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neuron_accuracy.logits.limits import Limits
from neuron_accuracy.subjects.protocol import Scores

__all__ = ["Parting", "parting_of"]


@dataclass(frozen=True)
class Parting:
    """The first token that differs."""

    index: int
    """Of the generated tokens, from 0."""
    reference_token: int
    test_token: int
    margin: float
    """The reference's value of its own token less that of the test's: logits, or log-probabilities of a server. If the
    server does not list the test's token, less the least it lists."""
    allowed: float
    """What two values that are each within limits can be apart."""

    @property
    def tie(self) -> bool:
        """Whether errors within limits can have decided it."""
        return self.margin <= self.allowed


def parting_of(
    reference: Sequence[int], test: Sequence[int], scores: Scores, limits: Limits, noise: float, scale: float
) -> Parting | None:
    """Where ``test`` parts from ``reference``, whose ``scores`` they are; None if nowhere.

    Each value may be off by ``atol`` and the limit of the few likeliest times ``scale``, or by ``noise`` if that is
    more: the greatest error that the target dtype alone makes.
    """
    pairs = zip(reference, test, strict=True)
    index = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if index is None:
        return None
    ours, theirs = reference[index], test[index]
    margin = _value(scores, index, ours) - _value(scores, index, theirs)
    allowed = 2 * max(limits.atol + min(limits.relative.values(), default=0.0) * scale, noise)
    return Parting(index, ours, theirs, margin, allowed)


def _value(scores: Scores, index: int, token: int) -> float:
    if scores.logits is not None:
        return float(scores.logits[index, token])
    at = (scores.top_ids[index] == token).nonzero()
    values = scores.top_logprobs[index]
    return float(values[at[0, 0]] if len(at) else values.min())
