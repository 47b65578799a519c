# SPDX-License-Identifier: Apache-2.0
"""Judges one request layer by layer: what is wrong, where it began, and what merely follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from neuron_accuracy.kv.causes import Cause, Sight, explain
from neuron_accuracy.kv.contiguous import block_of
from neuron_accuracy.kv.requests import Pair

__all__ = ["Judge", "Overwritten"]

_UNRELATED = 0.2
"""Mean relative error from which a block's content is another's; keys of other tokens may be fairly alike."""
_STILL = 0.1
"""The same in further layers, once a block is known to be overwritten."""


@dataclass
class Overwritten:
    """Blocks of one request that hold what was not written for it."""

    blocks: tuple[int, ...]
    """Places in the request's block table."""
    positions: tuple[int, ...]
    layers: list[int]
    error: float
    """Mean relative L2 error over these positions in the first such layer."""


@dataclass
class Judge:
    """What has been found wrong with one request so far."""

    pair: Pair
    causes: list[Cause] = field(default_factory=list)
    overwritten: list[Overwritten] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    """Layers that do not agree and come after a cause that explains it."""

    @property
    def first_cause(self) -> int | None:
        """The first layer in which something is wrong that later ones compute with."""
        return min((cause.layer for cause in self.causes), default=None)

    @property
    def first_layer(self) -> int | None:
        """The first layer in which something is wrong."""
        layers = [cause.layer for cause in self.causes] + [item.layers[0] for item in self.overwritten]
        return min(layers, default=None)

    def look(self, layer: int, sights: Mapping[str, Sight]) -> None:
        """Take in the next layer: its parts over the positions that are finite on both sides."""
        sights = self._without_overwritten(layer, sights)
        unexplained: dict[str, list[int]] = {}
        for part, sight in sights.items():
            found, left = explain(sight, self.causes)
            self.causes += found
            if left:
                unexplained[part] = left
        if not unexplained:
            return
        if any(cause.layer < layer for cause in self.causes):
            self.following.append(layer)
            return
        for part, heads in unexplained.items():
            self.causes.append(_diverges(sights[part], heads))

    def _without_overwritten(self, layer: int, sights: Mapping[str, Sight]) -> dict[str, Sight]:
        """The parts without overwritten blocks, and without what came after these and attended to them."""
        for known in self.overwritten:
            if any(_still(sight, known.positions) for sight in sights.values()):
                known.layers.append(layer)
        begin = min((known.positions[0] for known in self.overwritten), default=None)
        if begin is not None:
            sights = _before(sights, begin)
        found = self._overwritten_blocks(layer, sights)
        if found is None:
            return dict(sights)
        self.overwritten.append(found)
        held = torch.tensor(found.positions)
        return {part: sight.at(~torch.isin(sight.positions, held)) for part, sight in sights.items()}

    def _overwritten_blocks(self, layer: int, sights: Mapping[str, Sight]) -> Overwritten | None:
        record, parts = self.pair.test.record, list(sights.values())
        if not parts or any(not torch.equal(sight.positions, parts[0].positions) for sight in parts):
            return None
        positions = parts[0].positions
        # In most heads: a block is written for all of them at once.
        shares = torch.stack([sight.bad.double().mean(dim=0) for sight in parts])
        bad = (shares >= 0.5).any(dim=0)
        if not bad.any() or bad.all():
            return None
        span = record.block_size * record.dcp
        blocks = positions // span
        touched = blocks[bad].unique()
        inside = torch.isin(blocks, touched)
        anywhere = torch.stack([sight.bad.any(dim=0) for sight in parts]).any(dim=0)
        if inside.all() or (anywhere & ~inside).any() or len(touched) > (len(blocks.unique()) + 1) // 2:
            return None
        whole, to_the_end = bool(bad[inside].all()), bool(bad[-1])
        if (layer > 0 and not whole) or (to_the_end and (not whole or len(touched) > 1)):
            return None
        error = max(float(sight.figures.by_position[:, bad].mean()) for sight in parts)
        if error < _UNRELATED:
            return None
        return Overwritten(tuple(touched.tolist()), tuple(positions[bad].tolist()), [layer], error)

    def describe_block(self, item: Overwritten) -> str:
        """``block 7 (cached)`` for each of its blocks."""
        record = self.pair.test.record
        span = record.block_size * record.dcp
        names = []
        for place in item.blocks:
            cached = (place + 1) * span <= record.num_cached
            names.append(f"block {block_of(record, place * span)}" + (", a cached one" if cached else ""))
        return "; ".join(names)


def _before(sights: Mapping[str, Sight], begin: int) -> dict[str, Sight]:
    kept = {part: sight.positions < begin for part, sight in sights.items()}
    return {part: sight.at(kept[part]) for part, sight in sights.items() if kept[part].any()}


def _still(sight: Sight, positions: tuple[int, ...]) -> bool:
    inside = torch.isin(sight.positions, torch.tensor(positions))
    return bool(inside.any()) and float(sight.figures.by_position[:, inside].mean()) >= _STILL


def _diverges(sight: Sight, heads: list[int]) -> Cause:
    bad = sight.bad[heads].any(dim=0)
    errors = sight.figures.by_position[heads]
    figures = {
        "relative_l2": float(sight.figures.relative_l2[heads].max()),
        "worst_position": float(sight.positions[errors.amax(dim=0).argmax()]),
        "limit": float(sight.head_limit[heads].min()),
    }
    positions = tuple(sight.positions[bad].tolist())
    return Cause("diverges", sight.part, tuple(heads), "", sight.layer, positions, figures)
