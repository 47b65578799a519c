# SPDX-License-Identifier: Apache-2.0
"""Rows of a captured run, found by the tokens of a request and a position: what is fed into another run."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import StepRecord
from neuron_accuracy.compare.traces import Trace, traces
from neuron_accuracy.compare.whole import assemble, slice_bounds
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.layout import Rows, TensorLayout

__all__ = ["ReferenceRows", "whole_rows"]


class ReferenceRows:
    """Whole rows of tensors of a capture, under the names by which runs are compared.

    A request of another run is one of the capture's if all its tokens up to the position asked for are.
    """

    def __init__(self, folder: Path) -> None:
        self.capture = Capture(folder)
        self._requests = traces(self.capture)
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
        free = [item for item in self._requests if item.request not in taken and _agrees(item, tokens, size)]
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

    def _row(self, asked: Sequence[Trace], name: str, tokens: Sequence[int], position: int) -> Tensor | None:
        for known in asked:
            place = known.places.get(position)
            if place is None or not _agrees(known, tokens, position + 1):
                continue
            step = self.capture.steps(place.dp)[place.step]
            module, tensor, part = self._sources[name]
            of_requests = self.capture.run.layout(module, tensor, step.phase).rows is Rows.REQUESTS
            # Of a request's tokens in a step only the last has a row that it is drawn from.
            if of_requests and place.seq < 0:
                continue
            whole = self._whole(module, tensor, part, step, place.dp)
            if whole is not None:
                return whole[place.seq if of_requests else place.row]
        return None

    def _read_whole(self, module: str, tensor: str, part: str, step: StepRecord, dp: int) -> Tensor | None:
        if module not in self.capture.modules_of(step, dp):
            return None
        ranks = self.capture.ranks(module, step, dp)
        if ranks != tuple(range(self.capture.run.ranks)):
            raise CaptureError(
                f"{module} of step {step.number}: ranks {ranks} of {self.capture.run.ranks} wrote it"
            )
        layout = self.capture.run.layout(module, tensor, step.phase)
        parts = [self.capture.load(module, tensor, step, rank, dp=dp) for rank in ranks]
        whole = assemble(parts, layout)
        whole = whole.flatten(1) if whole.dim() > 1 else whole.unsqueeze(1)
        if part:
            begin, end = slice_bounds(layout.slices)[part]
            whole = whole[:, begin:end]
        return whole

    def _read_sources(self) -> dict[str, tuple[str, str, str]]:
        """By compared name: module, tensor and slice (empty for all) of the capture."""
        run = self.capture.run
        sources: dict[str, tuple[str, str, str]] = {}
        ran = [(dp, step) for dp in self.capture.replicas for step in self.capture.steps(dp)]
        for dp, step in ran:
            for module in self.capture.modules_of(step, dp):
                rank = self.capture.ranks(module, step, dp)[0]
                for tensor in self.capture.tensors(module, step, rank, dp):
                    name = f"{module}:{tensor}"
                    sources.setdefault(run.names.get(name, name), (module, tensor, ""))
                    for part in run.layout(module, tensor, step.phase).slices:
                        named = run.names.get(f"{name}:{part.name}")
                        if named is not None:
                            sources.setdefault(named, (module, tensor, part.name))
        return sources


def _agrees(known: Trace, tokens: Sequence[int], end: int) -> bool:
    """Whether a request's first ``end`` tokens are those."""
    return all(known.tokens.get(position) == tokens[position] for position in range(end))


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
