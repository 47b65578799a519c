# SPDX-License-Identifier: Apache-2.0
"""From rows of logits to scores, and what both forms of scores have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neuron_accuracy.errors import SubjectError
from neuron_accuracy.subjects.protocol import Scores

__all__ = ["concatenated", "likeliest", "scores_of"]


def scores_of(logits: torch.Tensor, tokens: Sequence[int], begin: int, top: int) -> Scores:
    """Scores of ``tokens`` out of ``logits`` ``[n, V]``, row i before token i; ``top`` each, 0 for whole rows.

    With whole rows ``top_ids`` and ``top_logprobs`` have no columns. Raises ``SubjectError`` on a top beyond V.
    """
    logits = logits.float()
    if top > logits.shape[1]:
        raise SubjectError(f"top={top}: the vocabulary has {logits.shape[1]} tokens; 0 gives them all")
    logprobs = logits.log_softmax(-1)
    ids = torch.tensor(list(tokens), dtype=torch.int64)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    values, indices = logprobs.topk(top, dim=1)
    return Scores(begin, chosen, indices, values, logits if top == 0 else None)


def concatenated(parts: Sequence[Scores]) -> Scores:
    """Scores of consecutive tokens as one; there is at least one part."""
    rows = [part.logits for part in parts if part.logits is not None]
    return Scores(
        parts[0].begin,
        torch.cat([part.chosen_logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
        torch.cat(rows) if rows else None,
    )


def likeliest(scores: Scores, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 and log-probabilities float32 ``[n, k]`` of the likeliest tokens of each row, in falling order.

    k is ``count``, or fewer if the scores hold fewer.
    """
    if scores.logits is None:
        return scores.top_ids[:, :count], scores.top_logprobs[:, :count]
    values, indices = scores.logits.log_softmax(-1).topk(min(count, scores.logits.shape[1]), dim=1)
    return indices, values
