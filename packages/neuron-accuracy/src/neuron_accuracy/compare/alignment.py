# SPDX-License-Identifier: Apache-2.0
"""Which rows of which steps of several captures belong to one token, whatever the steps and the batches were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_accuracy.compare.traces import Place, Trace
from neuron_accuracy.layout import Rows

__all__ = ["Alignment", "Span"]


@dataclass(frozen=True, eq=False)
class Span:
    """Rows of one step of each capture: row i of all of them is the same token's."""

    steps: tuple[tuple[int, int], ...]
    """Per capture, ``(replica, index of the step)``."""
    rows: tuple[Tensor, ...]
    """Per capture, int64 ``[n]``."""
    pairs: Tensor
    """int64 ``[n]``: which request each is of."""
    positions: Tensor
    """int64 ``[n]``."""

    def pieces(self, count: int) -> Iterator[Span]:
        """The same in spans of at most so many rows."""
        for begin in range(0, len(self.pairs), count):
            cut = slice(begin, begin + count)
            rows = tuple(item[cut] for item in self.rows)
            yield Span(self.steps, rows, self.pairs[cut], self.positions[cut])


class Alignment:
    """Aligns the requests of several captures: ``requests[i]`` is one request's trace in each, and ``positions[i]``
    those of its positions where the tokens of all agree.
    """

    def __init__(self, requests: Sequence[Sequence[Trace]], positions: Sequence[Sequence[int]]) -> None:
        self._requests = requests
        self._positions = positions
        self._spans: dict[tuple[Rows, ...], list[Span]] = {}

    def spans(self, kinds: tuple[Rows, ...]) -> list[Span]:
        """All aligned rows, given what each capture's rows count; a request's is that of its last token in a step."""
        if kinds not in self._spans:
            self._spans[kinds] = list(self._aligned(kinds))
        return self._spans[kinds]

    def _aligned(self, kinds: tuple[Rows, ...]) -> Iterator[Span]:
        found: dict[tuple[tuple[int, int], ...], list[tuple[int, ...]]] = defaultdict(list)
        for pair, traces in enumerate(self._requests):
            for position in self._positions[pair]:
                places = [trace.places[position] for trace in traces]
                rows = [_row(place, kind) for place, kind in zip(places, kinds, strict=True)]
                if min(rows) >= 0:
                    steps = tuple((place.dp, place.step) for place in places)
                    found[steps].append((*rows, pair, position))
        for steps, items in found.items():
            *each, pairs, positions = torch.tensor(items, dtype=torch.int64).unbind(1)
            yield Span(steps, tuple(each), pairs, positions)


def _row(place: Place, kind: Rows) -> int:
    return place.row if kind is Rows.TOKENS else place.seq
