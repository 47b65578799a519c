# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of drawn and of prompt tokens, for the requests that ask and for no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.requests import Request, RequestTable

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


def prompt_logprobs(
    batch: Batch, table: RequestTable, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], scores: Scores
) -> dict[str, LogprobsTensors | None]:
    """Add this step's part of every asked-for prompt; return those that this step completes.

    ``hidden [T, H]`` are the final hidden states of the step's tokens and ``logits_of`` turns ``[n, H]`` into
    ``[n, V]``. Position ``i`` of a prompt scores its token ``i + 1``, so a prompt of n tokens has n - 1 rows.
    """
    done: dict[str, LogprobsTensors | None] = {}
    for index, request in enumerate(batch.requests):
        if not request.wants_prompt_logprobs:
            continue
        row, last = request.row, request.num_prompt_tokens - 1
        begin = int(table.num_computed[row])
        count = min(batch.num_scheduled[index], last - begin)
        if count > 0:
            first = int(batch.starts[index])
            found = scores(logits_of(hidden[first : first + count]))
            _keep(
                request,
                begin,
                found,
                torch.from_numpy(table.token_ids[row, begin + 1 : begin + 1 + count]).long(),
            )
        if batch.draws[index]:
            done[request.request_id] = request.prompt_logprobs or LogprobsTensors.empty_cpu(0, 1)
            request.prompt_logprobs, request.wants_prompt_logprobs = None, False
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
