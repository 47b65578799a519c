# SPDX-License-Identifier: Apache-2.0
"""The requests of a capture: which tokens each had, and where their rows are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import StepRecord, StepRow

__all__ = ["Place", "Trace", "traces"]


class Place(NamedTuple):
    """Where the row of one token is."""

    dp: int
    step: int
    """Index among the replica's steps."""
    row: int
    """Among the step's tokens."""
    seq: int
    """Among the step's requests if it is the request's last token in the step, else -1."""


@dataclass(frozen=True)
class Trace:
    """All tokens of a request that a capture has, by position; of a position that ran twice, the last.

    A position without a place was not computed: the cache held it already.
    """

    key: tuple[int, str, int]
    """Its replica, its id there, and how many requests of that id the replica had before: replicas number their
    requests each from 0, and a server may be given an id again.
    """
    request: str
    """The id; of a capture's further requests of one id, ``id#2``, ``id#3``, …"""
    tokens: Mapping[int, int]
    places: Mapping[int, Place]
    restarted: bool
    """Whether a position ran twice, as after a preemption."""


def traces(capture: Capture) -> list[Trace]:
    """Every request of a capture, in the order they were first seen."""
    held: list[_Held] = []
    for dp in capture.replicas:
        latest: dict[str, _Held] = {}
        for index, step in enumerate(capture.steps(dp)):
            for row in step.rows:
                known = latest.get(row.request)
                if known is None or known.is_another(row):
                    count = 0 if known is None else known.key[2] + 1
                    known = latest[row.request] = _Held((dp, row.request, count))
                    held.append(known)
                known.add(index, step, row)
    seen: dict[str, int] = defaultdict(int)
    found = []
    for item in held:
        seen[item.key[1]] += 1
        count = seen[item.key[1]]
        name = item.key[1] if count == 1 else f"{item.key[1]}#{count}"
        found.append(Trace(item.key, name, item.tokens, item.places, item.restarted))
    return found


class _Held:
    """What is known of a request so far."""

    def __init__(self, key: tuple[int, str, int]) -> None:
        self.key = key
        self.tokens: dict[int, int] = {}
        self.places: dict[int, Place] = {}
        self.restarted = False
        self._drafts: set[int] = set()
        """Positions that a decode step computed behind its first token: a later step may correct them."""

    def is_another(self, row: StepRow) -> bool:
        """Whether a row of this id is no more of this request: it has another token where that was settled."""
        return any(
            self.tokens.get(position, token) != token and position not in self._drafts
            for position, token in _tokens(row)
        )

    def add(self, index: int, step: StepRecord, row: StepRow) -> None:
        """Add the tokens of a step."""
        self.restarted |= any(
            position in self.tokens and position not in self._drafts for position, _ in _tokens(row)
        )
        self.tokens.update(_tokens(row))
        last = len(row.positions) - 1
        for offset, position in enumerate(row.positions):
            seq = row.row if offset == last else -1
            self.places[position] = Place(self.key[0], index, row.begin + offset, seq)
        if row.positions:
            self._drafts = {position for position in self._drafts if position > row.positions[0]}
            self._drafts -= set(row.positions)
            if step.phase == "decode":
                self._drafts |= set(row.positions[1:])


def _tokens(row: StepRow) -> Iterator[tuple[int, int]]:
    yield from enumerate(row.cached_ids)
    yield from zip(row.positions, row.token_ids, strict=True)
