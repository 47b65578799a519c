# SPDX-License-Identifier: Apache-2.0
"""What the runner knows of each request, as one row of a few arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import LogprobsTensors

from neuron_core.kv.slots import NO_BLOCK
from neuron_core.logit_edits import BAN_SLOTS
from vllm_neuron.runner.prompt_embeds import PromptEmbeds, read_prompt
from vllm_neuron.runner.randomness import request_seed

_GREEDY_BELOW = 1e-5  # vLLM's own limit
_LARGEST_TOP_K = int(np.iinfo(np.int32).max)


UNKNOWN = -1
"""Id of a token that has been drawn and that the host has not read yet."""


@dataclass(eq=False)
class Request:
    """One request; ``row`` is its place in the :class:`RequestTable` that holds its tokens and blocks.

    A request that comes back after a preemption is another object: what was in flight for the first is not its.
    """

    request_id: str
    row: int
    prompt_ids: NDArray[np.int32] = field(repr=False)
    sampling: SamplingParams
    embeds: PromptEmbeds | None = field(default=None, repr=False)
    """What of the prompt is given as embeddings; its ``prompt_ids`` say nothing there."""
    pooling: PoolingParams | None = None
    """How a text is embedded; then no token is drawn, and ``sampling`` says nothing."""
    num_blocks: int = 0
    prompt_logprobs: LogprobsTensors | None = field(default=None, repr=False)
    """What has been scored of the prompt; belongs to the stream that runs the steps."""
    wants_prompt_logprobs: bool = False
    """Whether a part of the prompt has still to be submitted for scoring."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """The ids of the prompt's tokens, in order; an embedding is none."""
        return self.prompt_ids if self.embeds is None else self.prompt_ids[self.embeds.is_token]

    @cached_property
    def is_edited(self) -> bool:
        """Whether the request's logits are edited before a token is drawn."""
        p = self.sampling
        return bool(
            p.presence_penalty
            or p.frequency_penalty
            or p.repetition_penalty != 1.0
            or p.logit_bias
            or p.allowed_token_ids
            or p.bad_words_token_ids
            or p.min_tokens
        )

    @cached_property
    def banned_words(self) -> list[list[int]]:
        """Those ``bad_words`` of more than one token."""
        return [word for word in self.sampling.bad_words_token_ids or () if len(word) > 1]

    @property
    def on_host(self) -> bool:
        """Whether its edits are more than the graph has room for, so that the host makes them."""
        return len(self.banned_words) > BAN_SLOTS


class RequestTable:
    """Rows of token ids, block ids and sampling settings, kept from a request's first step to its last.

    Arrays, with one row per request: ``token_ids [rows, max_model_len]`` int32, ``block_tables [rows, width]`` int32
    (-1 where there is no block), ``num_tokens``/``num_computed`` ``[rows]`` int64, and the sampling settings.
    """

    def __init__(self, max_model_len: int, block_size: int, width: int, engine_seed: int) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.engine_seed = engine_seed
        self.requests: dict[str, Request] = {}
        self._free: list[int] = []
        self._width = width
        self._make_rows(8)

    def _make_rows(self, rows: int) -> None:
        shapes = {
            "token_ids": ((self.max_model_len,), np.int32, 0),
            "block_tables": ((self._width,), np.int32, NO_BLOCK),
            "num_tokens": ((), np.int64, 0),
            "num_computed": ((), np.int64, 0),
            "temperature": ((), np.float32, 0.0),
            "top_k": ((), np.int32, 0),
            "top_p": ((), np.float32, 1.0),
            "min_p": ((), np.float32, 0.0),
            "seed": ((), np.uint64, 0),
        }
        for name, (shape, dtype, fill) in shapes.items():
            grown = np.full((rows, *shape), fill, dtype=dtype)
            old = getattr(self, name, None)
            if old is not None:
                grown[: len(old)] = old
            setattr(self, name, grown)
        self._free.extend(range(rows - 1, rows - 1 - (rows - len(self.requests)), -1))

    token_ids: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    num_computed: NDArray[np.int64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]

    def update(self, step: SchedulerOutput) -> None:
        """Bring the rows up to what the scheduler says, before the step is run."""
        for request_id in step.finished_req_ids:
            self._remove(request_id)
        for new in step.scheduled_new_reqs:
            self._remove(new.req_id)  # an id may finish and come back within one step
            self._add(new)
        self._advance(step.scheduled_cached_reqs)

    def append(self, request: Request, token_id: int = UNKNOWN) -> int | None:
        """Add a token the request draws; returns its place, or None if the row is full and the token of no use."""
        length = int(self.num_tokens[request.row])
        if length >= self.max_model_len:
            return None
        self.token_ids[request.row, length] = token_id
        self.num_tokens[request.row] = length + 1
        return length

    def fill(self, request: Request, place: int, token_id: int) -> None:
        """Replace an ``UNKNOWN`` token; does nothing if the request has ended or started anew meanwhile."""
        if self.requests.get(request.request_id) is request:
            self.token_ids[request.row, place] = token_id

    def output_ids(self, request: Request) -> list[int]:
        """Tokens drawn so far, in order; the last may be ``UNKNOWN``."""
        ids: list[int] = self.token_ids[
            request.row, request.num_prompt_tokens : self.num_tokens[request.row]
        ].tolist()
        return ids

    def _add(self, new: NewRequestData) -> None:
        if new.sampling_params is None and new.pooling_params is None:
            raise ValueError(f"request {new.req_id} has no sampling parameters")
        if not self._free:
            self._make_rows(2 * len(self.token_ids))
        params = new.sampling_params or SamplingParams()
        prompt_ids, embeds = read_prompt(new)
        request = Request(new.req_id, self._free.pop(), prompt_ids, params, embeds, new.pooling_params)
        request.wants_prompt_logprobs = params.prompt_logprobs is not None
        self.requests[new.req_id] = request
        row = request.row
        self.token_ids[row, : request.num_prompt_tokens] = request.prompt_ids
        self.num_tokens[row] = request.num_prompt_tokens
        self.num_computed[row] = new.num_computed_tokens
        self.temperature[row] = 0.0 if params.temperature < _GREEDY_BELOW else params.temperature
        self.top_k[row] = min(max(params.top_k, 0), _LARGEST_TOP_K)  # both are beyond any vocabulary
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        seed = request_seed(new.req_id, self.engine_seed) if params.seed is None else params.seed
        self.seed[row] = seed & 0xFFFFFFFFFFFFFFFF
        self._set_blocks(request, new.block_ids[0] if new.block_ids else ())

    def _advance(self, cached: CachedRequestData) -> None:
        for index, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            self.num_computed[request.row] = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self._restart(request, cached.all_token_ids[request_id], blocks[0] if blocks else [])
            elif blocks:
                self._append_blocks(request, blocks[0])

    def _restart(self, old: Request, token_ids: list[int], block_ids: Iterable[int]) -> None:
        """A token in flight when vLLM forced the preemption was drawn here and dropped there."""
        request = Request(old.request_id, old.row, old.prompt_ids, old.sampling, old.embeds, old.pooling)
        nothing_was_read = len(token_ids) <= request.num_prompt_tokens
        request.wants_prompt_logprobs = request.sampling.prompt_logprobs is not None and nothing_was_read
        self.requests[request.request_id] = request
        self.token_ids[request.row, : len(token_ids)] = token_ids
        self.num_tokens[request.row] = len(token_ids)
        self._set_blocks(request, block_ids)

    def _set_blocks(self, request: Request, block_ids: Iterable[int]) -> None:
        self.block_tables[request.row] = NO_BLOCK
        request.num_blocks = 0
        self._append_blocks(request, block_ids)

    def _append_blocks(self, request: Request, block_ids: Iterable[int]) -> None:
        added = list(block_ids)
        self.block_tables[request.row, request.num_blocks : request.num_blocks + len(added)] = added
        request.num_blocks += len(added)

    def _remove(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._free.append(request.row)
