# SPDX-License-Identifier: Apache-2.0
"""From vLLM's bit masks of the requests that have a grammar to the mask of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput

from neuron_core.token_mask import allow_everything
from vllm_neuron.runner.requests import Request


def allowed_tokens(
    grammar: GrammarOutput | None, requests: Sequence[Request], num_seqs: int, vocab_size: int
) -> Tensor | None:
    """int32 ``[num_seqs, ceil(V / 32)]``: each request's mask in its row, everything in the others.

    None if no request of the step has a grammar that says something now. vLLM's masks come in an order of their own
    and without the requests that draw nothing in the step. Raises ``ValueError`` if they are of another vocabulary.
    """
    if grammar is None or not grammar.structured_output_request_ids:
        return None
    mask = allow_everything(num_seqs, vocab_size)
    given = torch.from_numpy(grammar.grammar_bitmask)
    ids = grammar.structured_output_request_ids
    if given.shape != (len(ids), mask.shape[1]):
        raise ValueError(
            f"grammar masks are {list(given.shape)}; {len(ids)} requests of a vocabulary of {vocab_size} tokens "
            f"have {[len(ids), mask.shape[1]]}"
        )
    row_of = {request.request_id: row for row, request in enumerate(requests)}
    rows = [row_of[request_id] for request_id in ids if request_id in row_of]
    kept = [index for index, request_id in enumerate(ids) if request_id in row_of]
    mask[rows] = given[kept]
    return mask
