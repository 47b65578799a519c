# SPDX-License-Identifier: Apache-2.0
"""Custom logits processors of vLLM's interface, called on the host for every request of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    build_logitsprocs,
    cached_load_custom_logitsprocs,
)

from vllm_neuron.runner.requests import Request

_CPU = torch.device("cpu")


def has_custom_processors(model: ModelConfig) -> bool:
    """Whether an engine of ``model`` runs any; raises as :func:`custom_processors` does."""
    named = model.logits_processors
    return bool(cached_load_custom_logitsprocs(None if named is None else tuple(named)))


def custom_processors(config: VllmConfig) -> CustomProcessors | None:
    """Those of ``--logits-processors`` and of installed packages, or None; raises what vLLM does if one is unusable."""
    found = build_logitsprocs(config, _CPU, False, False, config.model_config.logits_processors or ())
    ours = [processor for processor in found.all if type(processor) not in BUILTIN_LOGITS_PROCESSORS]
    return CustomProcessors(ours) if ours else None


class CustomProcessors:
    """Processors, and the batch as they know it: the requests of the step before, each in a place of its own.

    Places are dense and change as little as may be, since a processor may keep what it likes by place; so their order
    is not that of a step's rows. Belongs to the stream that runs the steps.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self.processors = tuple(processors)
        self.has_invariant = any(processor.is_argmax_invariant() for processor in processors)
        self._places: list[Request] = []
        self._outputs: dict[Request, list[int]] = {}
        self._rows = torch.empty(0, dtype=torch.int64)

    @property
    def names(self) -> list[str]:
        """Their classes' names."""
        return [type(processor).__name__ for processor in self.processors]

    def update(self, requests: Sequence[Request], outputs: Sequence[Sequence[int]]) -> None:
        """Tell the processors which requests come and go, and what each row's request has drawn.

        A request keeps one list of its tokens, which grows from step to step, as vLLM promises.
        """
        lists = {}
        for request, known in zip(requests, outputs, strict=True):
            lists[request] = self._outputs.get(request, [])
            lists[request][:] = known
        self._outputs = lists
        change = self._place(requests)
        row_of = {request: row for row, request in enumerate(requests)}
        self._rows = torch.tensor([row_of[request] for request in self._places])
        for processor in self.processors:
            processor.update_state(change)

    def apply(self, logits: Tensor) -> Tensor:
        """``logits [R, V]`` after the processors that may change which token is likeliest."""
        return self._apply(logits, invariant=False)

    def apply_invariant(self, logits: Tensor) -> Tensor:
        """Tempered ``logits [R, V]`` after those that may not; they count where a token is drawn at random."""
        return self._apply(logits, invariant=True)

    def _apply(self, logits: Tensor, invariant: bool) -> Tensor:
        placed = logits[self._rows]
        for processor in self.processors:
            if processor.is_argmax_invariant() is invariant:
                placed = processor.apply(placed)
        return torch.empty_like(placed).index_copy_(0, self._rows, placed)

    def _place(self, requests: Sequence[Request]) -> BatchUpdate | None:
        """Bring the places up to ``requests``: new ones fill what others left, and the last fill what is still left."""
        places, staying = self._places, set(requests)
        holes = [place for place, request in enumerate(places) if request not in staying]
        fresh = [request for request in requests if request not in set(places)]
        if not holes and not fresh:
            return None
        added = []
        for request in fresh:
            place = holes.pop(0) if holes else len(places)
            places[place : place + 1] = [request]
            added.append((place, request.sampling, request.prompt_tokens.tolist(), self._outputs[request]))
        moved = []
        for hole in holes:
            while places and places[-1] not in staying:
                places.pop()
            if hole < len(places) - 1:
                moved.append((len(places) - 1, hole, MoveDirectionality.UNIDIRECTIONAL))
                places[hole] = places.pop()
        return BatchUpdate(batch_size=len(places), removed=holes, added=added, moved=moved)
