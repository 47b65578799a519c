# SPDX-License-Identifier: Apache-2.0
"""Two subjects' scores of the same tokens, side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.subjects.protocol import Scores

__all__ = ["NEVER", "Pairs", "finite_rows", "pair"]


NEVER = 1e3
"""A token this many nats less likely than the likeliest is never drawn: e^-1000 is 0 in any dtype. A model's logits
span some tens; beyond are columns that were masked, with -1e4, -1e9 or a dtype's lowest number, which say nothing."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Values of the same tokens in both, float32 ``[n, m]``, in the order of the reference's, greatest first.

    Where both have whole rows they are logits, of all tokens; of those that neither can draw (:data:`NEVER`) the test's
    are the reference's. Otherwise they are log-probabilities of the tokens that either lists, or would list if it gave
    as many as the other: what the other does not list is at most the least it does list, and is taken to be equal
    where that is possible, so that what is not known is never a difference.
    """

    ids: torch.Tensor
    """int64 ``[n, m]``; −1 fills rows that list fewer, with equal values."""
    reference: torch.Tensor
    test: torch.Tensor
    scale: torch.Tensor
    """float32 ``[n]``: the greatest magnitude in the reference's row of logits, or of the log-probabilities it lists,
    without those of tokens that it can never draw. What the test says is no part of it."""
    whole: bool

    @property
    def difference(self) -> torch.Tensor:
        """Test less reference, ``[n, m]``."""
        return self.test - self.reference


def finite_rows(scores: Scores) -> torch.Tensor:
    """bool ``[n]``: whether all of a row is finite."""
    values = scores.top_logprobs if scores.logits is None else scores.logits
    return values.isfinite().all(dim=1)


def pair(reference: Scores, test: Scores) -> Pairs:
    """Both scores side by side; all rows are finite, and of the same tokens.

    Raises ``AccuracyError`` if one lists token ids that the other's vocabulary does not have.
    """
    if reference.logits is not None and test.logits is not None:
        values, ids = reference.logits.sort(dim=1, descending=True, stable=True)
        theirs = test.logits.gather(1, ids)
        return Pairs(ids, values, _but_never(values, theirs), _scale(reference), whole=True)
    rows = [_row(reference, test, index) for index in range(len(reference.chosen_logprobs))]
    width = max((len(ids) for ids, _, _ in rows), default=1)
    ids = torch.full((len(rows), width), -1, dtype=torch.int64)
    left, right = torch.full((len(rows), width), -torch.inf), torch.full((len(rows), width), -torch.inf)
    for index, (listed, ours, theirs) in enumerate(rows):
        ids[index, : len(listed)], left[index, : len(listed)] = listed, ours
        right[index, : len(listed)] = theirs
    missing = ids < 0
    left, right = left.masked_fill(missing, 0.0), right.masked_fill(missing, 0.0)
    return Pairs(ids, left, right, _scale(reference), whole=False)


def _row(reference: Scores, test: Scores, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.cat([_listed(reference, test, index), _listed(test, reference, index)]).unique()
    ours, ours_least = _values(reference, index, ids)
    theirs, theirs_least = _values(test, index, ids)
    ours = ours.where(ours.isfinite(), theirs.clamp(max=ours_least))
    theirs = theirs.where(theirs.isfinite(), ours.clamp(max=theirs_least))
    theirs = _but_never(ours[None], theirs[None])[0]
    order = ours.argsort(descending=True, stable=True)
    return ids[order], ours[order], theirs[order]


def _listed(scores: Scores, other: Scores, index: int) -> torch.Tensor:
    """Ids that a side lists: with whole rows as many as the other does."""
    if scores.logits is None:
        return scores.top_ids[index]
    row = scores.logits[index]
    return row.topk(min(other.top_ids.shape[1], len(row))).indices


def _values(scores: Scores, index: int, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Log-probabilities of ``ids``, NaN where not known, and the most that an unknown one can be."""
    if scores.logits is not None:
        row = scores.logits[index]
        if strange := ids[(ids < 0) | (ids >= len(row))].tolist():
            raise AccuracyError(
                f"token id {strange[0]} is listed on one side, and the other's vocabulary has {len(row)} tokens; "
                "two that serve one model work"
            )
        return row.log_softmax(-1)[ids], 0.0
    at = (ids[:, None] == scores.top_ids[index][None, :]).float()
    found = at.any(dim=1)
    values = scores.top_logprobs[index][at.argmax(dim=1)]
    return values.where(found, torch.nan), float(scores.top_logprobs[index].min())


def _never(values: torch.Tensor) -> torch.Tensor:
    return values < values.amax(dim=1, keepdim=True) - NEVER


def _but_never(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """``theirs``, equal to ``ours`` where neither side can draw the token."""
    return theirs.where(~(_never(ours) & _never(theirs)), ours)


def _scale(reference: Scores) -> torch.Tensor:
    values = reference.top_logprobs if reference.logits is None else reference.logits
    return values.masked_fill(_never(values), 0.0).abs().amax(dim=1)
