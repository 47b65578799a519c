# SPDX-License-Identifier: Apache-2.0
"""Rows of a captured run, found by the tokens of a request and a position: what is fed into another run."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import StepRecord
from neuron_accuracy.compare.whole import assemble, slice_bounds
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.layout import Rows, TensorLayout

__all__ = ["ReferenceRows", "whole_rows"]


@dataclass(frozen=True, eq=False)
class _Known:
    """A request of the capture: the token at each position, and the step and row that computed it."""

    request: str
    tokens: Mapping[int, int]
    places: Mapping[int, tuple[StepRecord, int, int]]

    def agrees(self, tokens: Sequence[int], end: int) -> bool:
        """Whether its first ``end`` tokens are those."""
        return all(self.tokens.get(position) == tokens[position] for position in range(end))


class ReferenceRows:
    """Whole rows of tensors of a capture, under the names by which runs are compared.

    A request of another run is one of the capture's if all its tokens up to the position asked for are.
    """

    def __init__(self, folder: Path) -> None:
        self.capture = Capture(folder)
        self._requests = self._read_requests()
        self._sources = self._read_sources()
        self._whole = lru_cache(maxsize=64)(self._read_whole)

    def knows(self, name: str) -> bool:
        """Whether it has a tensor of this name, ``module:tensor``."""
        return name in self._sources

    def sequences(self) -> list[tuple[int, ...]]:
        """The tokens of each request from its first on, as far as they are known."""
        found = []
        for known in self._requests:
            size = next(position for position in count() if position not in known.tokens)
            found.append(tuple(known.tokens[position] for position in range(size)))
        return [tokens for tokens in found if tokens]

    def request_of(self, tokens: Sequence[int], taken: Container[str]) -> str | None:
        """Of the requests not in ``taken`` that computed ``tokens`` the one that computed least else, the first of
        several; None if there is none. So each of several equal sequences gets a request of its own.
        """
        size = len(tokens)
        free = [item for item in self._requests if item.request not in taken and item.agrees(tokens, size)]
        return min(free, key=lambda item: len(item.tokens)).request if free else None

    def rows(
        self, name: str, tokens: Sequence[int], positions: Sequence[int], request: str | None = None
    ) -> list[Tensor | None]:
        """One row ``[features]`` per position of a tensor ``module:tensor``; None where no request of the capture, or
        not ``request``, has these tokens up to there.

        Raises ``CaptureError`` if no step has the tensor.
        """
        if name not in self._sources:
            raise CaptureError(f"{self.capture.folder} has no {name}; capture that module too")
        asked = [known for known in self._requests if request is None or known.request == request]
        return [self._row(asked, name, tokens, position) for position in positions]

    def _row(self, asked: Sequence[_Known], name: str, tokens: Sequence[int], position: int) -> Tensor | None:
        for known in asked:
            if position in known.places and known.agrees(tokens, position + 1):
                step, token_row, request_row = known.places[position]
                module, tensor, part = self._sources[name]
                layout = self.capture.run.layout(module, tensor, step.phase)
                whole = self._whole(module, tensor, part, step)
                if whole is None:
                    continue
                if layout.rows is Rows.REQUESTS and not self._is_last(known, step, position):
                    continue
                return whole[request_row if layout.rows is Rows.REQUESTS else token_row]
        return None

    def _is_last(self, known: _Known, step: StepRecord, position: int) -> bool:
        """Whether a step has no later token of the request: only that one's row is drawn from."""
        following = known.places.get(position + 1)
        return following is None or following[0] is not step

    def _read_whole(self, module: str, tensor: str, part: str, step: StepRecord) -> Tensor | None:
        if module not in self.capture.modules_of(step):
            return None
        ranks = self.capture.ranks(module, step)
        if ranks != tuple(range(self.capture.run.ranks)):
            raise CaptureError(
                f"{module} of step {step.number}: ranks {ranks} of {self.capture.run.ranks} wrote it"
            )
        layout = self.capture.run.layout(module, tensor, step.phase)
        parts = [self.capture.load(module, tensor, step, rank) for rank in ranks]
        whole = assemble(parts, layout)
        whole = whole.flatten(1) if whole.dim() > 1 else whole.unsqueeze(1)
        if part:
            begin, end = slice_bounds(layout.slices)[part]
            whole = whole[:, begin:end]
        return whole

    def _read_requests(self) -> list[_Known]:
        found: dict[str, tuple[dict[int, int], dict[int, tuple[StepRecord, int, int]]]] = {}
        for step in self.capture.steps():
            for row in step.rows:
                tokens, places = found.setdefault(row.request, ({}, {}))
                tokens.update(enumerate(row.cached_ids))
                for offset, (position, token) in enumerate(zip(row.positions, row.token_ids, strict=True)):
                    tokens[position] = token
                    places[position] = (step, row.begin + offset, row.row)
        return [_Known(request, *item) for request, item in found.items()]

    def _read_sources(self) -> dict[str, tuple[str, str, str]]:
        """By compared name: module, tensor and slice (empty for all) of the capture."""
        run = self.capture.run
        sources: dict[str, tuple[str, str, str]] = {}
        for step in self.capture.steps():
            for module in self.capture.modules_of(step):
                for tensor in self.capture.tensors(module, step, self.capture.ranks(module, step)[0]):
                    name = f"{module}:{tensor}"
                    sources.setdefault(run.names.get(name, name), (module, tensor, ""))
                    for part in run.layout(module, tensor, step.phase).slices:
                        named = run.names.get(f"{name}:{part.name}")
                        if named is not None:
                            sources.setdefault(named, (module, tensor, part.name))
        return sources


def whole_rows(
    source: ReferenceRows,
    name: str,
    slices: Mapping[str, str],
    layout: TensorLayout,
    tokens: Sequence[int],
    positions: Sequence[int],
) -> list[Tensor | None]:
    """Rows of a tensor that the other run calls ``name``, or whose ``slices`` it has under names of their own."""
    if not slices:
        return source.rows(name, tokens, positions)
    columns = [source.rows(slices[part.name], tokens, positions) for part in layout.slices]
    rows: list[Tensor | None] = []
    for pieces in zip(*columns, strict=True):
        held = [piece for piece in pieces if piece is not None]
        rows.append(torch.cat(held) if len(held) == len(pieces) else None)
    return rows
