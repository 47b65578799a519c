# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of drawn and of prompt tokens, for the requests that ask and for no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.requests import Request

Scores = Callable[[Tensor], Tensor]
"""Logits ``[n, V]`` to what is reported of them: log-probabilities, or the logits themselves."""


def scores_of(logprobs_mode: str) -> Scores:
    """The function of vLLM's ``--logprobs-mode``; both raw modes precede temperature and every edit."""
    if logprobs_mode == "raw_logits":
        return lambda logits: logits
    return lambda logits: logits.log_softmax(-1)


def gather(scores: Tensor, count: int, token_ids: Tensor) -> LogprobsTensors:
    """The chosen tokens' scores in column 0, then the ``count`` largest, and the chosen tokens' ranks from 1.

    ``scores [n, V]`` float32, ``token_ids [n]`` int64 -> ``[n, count + 1]`` int32 and float32, ``[n]`` int64.
    """
    chosen = scores.gather(1, token_ids.unsqueeze(1))
    best, best_ids = scores.topk(count, dim=1)
    ranks = (scores >= chosen).sum(1)
    ids = torch.cat((token_ids.unsqueeze(1), best_ids), dim=1).to(torch.int32)
    return LogprobsTensors(ids, torch.cat((chosen, best), dim=1), ranks)


def drawn_logprobs(
    logits: Tensor, tokens: Tensor, requests: Sequence[Request], scores: Scores
) -> LogprobsLists | None:
    """Scores of the drawn ``tokens [R]`` given ``logits [R, V]``; rows of requests that did not ask are zero."""
    wanted = {row: _width(r.sampling.logprobs, logits.shape[1]) for row, r in enumerate(requests) if _asks(r)}
    if not wanted:
        return None
    rows = list(wanted)
    widest = max(wanted.values())
    found = gather(scores(logits[rows]), widest, tokens[rows].long())
    ids = np.zeros((len(requests), widest + 1), np.int32)
    values = np.zeros((len(requests), widest + 1), np.float32)
    ranks = np.zeros(len(requests), np.int64)
    ids[rows], values[rows], ranks[rows] = (t.numpy() for t in found[:3])
    return LogprobsLists(ids, values, ranks)


@dataclass(frozen=True, eq=False)
class PromptPart:
    """The part of a prompt that a step scores."""

    request: Request
    begin: int
    """Place in the prompt of the step's first token."""
    first: int
    """Index of that token on the step's token axis."""
    count: int
    """How many of the step's tokens score one that follows in the prompt; may be 0."""
    is_last: bool

    def targets(self) -> Tensor:
        """The tokens that are scored, ``[count]`` int64: position ``i`` of a prompt scores its token ``i + 1``."""
        following = self.request.prompt_ids[self.begin + 1 : self.begin + 1 + self.count]
        return torch.from_numpy(following).long()


def prompt_parts(batch: Batch, num_computed: NDArray[np.int64]) -> tuple[PromptPart, ...]:
    """What a step scores of each asked-for prompt; ``num_computed`` is the table's, by row.

    A request's last part ends its wish: the next step need not score for it.
    """
    parts = []
    for index, request in enumerate(batch.requests):
        if not request.wants_prompt_logprobs:
            continue
        begin = int(num_computed[request.row])
        # A prompt of n tokens has n - 1 that follow another.
        count = max(0, min(batch.num_scheduled[index], request.num_prompt_tokens - 1 - begin))
        parts.append(PromptPart(request, begin, int(batch.starts[index]), count, batch.draws[index]))
        request.wants_prompt_logprobs = not batch.draws[index]
    return tuple(parts)


def score_prompts(
    parts: Sequence[PromptPart], hidden: Tensor, logits_of: Callable[[Tensor], Tensor], scores: Scores
) -> dict[str, LogprobsTensors | None]:
    """Add ``parts`` to what is known of their prompts; return those that they complete, by request id.

    ``hidden [T, H]`` are the final hidden states of the step's tokens and ``logits_of`` turns ``[n, H]`` into
    ``[n, V]``.
    """
    done: dict[str, LogprobsTensors | None] = {}
    for part in parts:
        request = part.request
        if part.count:
            found = scores(logits_of(hidden[part.first : part.first + part.count]))
            _keep(request, part.begin, found, part.targets())
        if part.is_last:
            done[request.request_id] = request.prompt_logprobs or LogprobsTensors.empty_cpu(0, 1)
            request.prompt_logprobs = None
    return done


def _keep(request: Request, begin: int, scores: Tensor, targets: Tensor) -> None:
    width = _width(request.sampling.prompt_logprobs, scores.shape[1])
    if request.prompt_logprobs is None:
        request.prompt_logprobs = LogprobsTensors.empty_cpu(request.num_prompt_tokens - 1, width + 1)
    place = slice(begin, begin + len(targets))
    for kept, new in zip(request.prompt_logprobs[:3], gather(scores, width, targets)[:3], strict=True):
        kept[place] = new


def _asks(request: Request) -> bool:
    return request.sampling.logprobs is not None


def _width(count: int | None, vocab: int) -> int:
    return vocab if count == -1 else int(count or 0)
