# SPDX-License-Identifier: Apache-2.0
"""Two subjects' scores of the same tokens, side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuron_accuracy.subjects.protocol import Scores

__all__ = ["Pairs", "finite_rows", "pair"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Values of the same tokens in both, float32 ``[n, m]``, in the order of the reference's, greatest first.

    Where both have whole rows they are logits, of all tokens. Otherwise they are log-probabilities of the tokens that
    either lists: what the other does not list is at most the least it does list, and is taken to be equal where that
    is possible, so that what is not known is never a difference.
    """

    ids: torch.Tensor
    """int64 ``[n, m]``; −1 fills rows that list fewer, with equal values."""
    reference: torch.Tensor
    test: torch.Tensor
    scale: torch.Tensor
    """float32 ``[n]``: the greatest magnitude in the reference's row of logits; if only the test has logits, in the
    test's; if neither has, the greatest of the log-probabilities listed."""
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
    """Both scores side by side; all rows are finite, and of the same tokens."""
    if reference.logits is not None and test.logits is not None:
        values, ids = reference.logits.sort(dim=1, descending=True, stable=True)
        scale = values.abs().amax(dim=1)
        return Pairs(ids, values, test.logits.gather(1, ids), scale, whole=True)
    rows = [_row(reference, test, index) for index in range(len(reference.chosen_logprobs))]
    width = max((len(ids) for ids, _, _ in rows), default=1)
    ids = torch.full((len(rows), width), -1, dtype=torch.int64)
    left, right = torch.full((len(rows), width), -torch.inf), torch.full((len(rows), width), -torch.inf)
    for index, (listed, ours, theirs) in enumerate(rows):
        ids[index, : len(listed)], left[index, : len(listed)] = listed, ours
        right[index, : len(listed)] = theirs
    missing = ids < 0
    left, right = left.masked_fill(missing, 0.0), right.masked_fill(missing, 0.0)
    return Pairs(ids, left, right, _scale(reference, test, left), whole=False)


def _row(reference: Scores, test: Scores, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    listed = [scores.top_ids[index] for scores in (reference, test) if scores.logits is None]
    ids = torch.cat(listed).unique()
    ours, ours_least = _values(reference, index, ids)
    theirs, theirs_least = _values(test, index, ids)
    ours = ours.where(ours.isfinite(), theirs.clamp(max=ours_least))
    theirs = theirs.where(theirs.isfinite(), ours.clamp(max=theirs_least))
    order = ours.argsort(descending=True, stable=True)
    return ids[order], ours[order], theirs[order]


def _values(scores: Scores, index: int, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Log-probabilities of ``ids``, NaN where not known, and the most that an unknown one can be."""
    if scores.logits is not None:
        return scores.logits[index].log_softmax(-1)[ids], 0.0
    at = (ids[:, None] == scores.top_ids[index][None, :]).float()
    found = at.any(dim=1)
    values = scores.top_logprobs[index][at.argmax(dim=1)]
    return values.where(found, torch.nan), float(scores.top_logprobs[index].min())


def _scale(reference: Scores, test: Scores, listed: torch.Tensor) -> torch.Tensor:
    whole = reference.logits if reference.logits is not None else test.logits
    return (listed if whole is None else whole).abs().amax(dim=1)
