# SPDX-License-Identifier: Apache-2.0
"""The figures of a comparison of caches as tables, heat maps and series of an outcome's data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from neuron_accuracy.kv.causes import Part, Sight
from neuron_accuracy.kv.figures import METRICS, Sums
from neuron_accuracy.kv.limits import Limits

__all__ = ["MAX_BINS", "MAX_POINTS", "PARTS", "RequestTable", "Tables"]

PARTS: tuple[Part, ...] = ("keys", "values")
MAX_BINS = 64
"""Most columns of a heat map over positions."""
MAX_POINTS = 256
"""Most points of a series over positions."""

_TITLES = {
    "cosine": "Cosine similarity",
    "relative_l2": "Relative L2 error",
    "relative_linf": "Relative L∞ error",
    "bhattacharyya": "Bhattacharyya coefficient",
    "gain": "Gain",
}


@dataclass
class RequestTable:
    """One request's figures. A number is NaN where no position could be compared."""

    num_layers: int
    length: int
    span: int
    """Positions of a block."""
    worst: dict[Part, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    """Per layer, of the worst head."""
    by_block: dict[Part, torch.Tensor] = field(init=False)
    """Largest relative error, float64 ``[layers, bins]``."""

    def __post_init__(self) -> None:
        blocks = -(-self.length // self.span)
        self.width = self.span * -(-blocks // MAX_BINS)
        bins = -(-self.length // self.width)
        self.by_block = {
            part: torch.full((self.num_layers, bins), torch.nan, dtype=torch.float64) for part in PARTS
        }

    @property
    def seen(self) -> bool:
        """Whether anything was compared."""
        return any(error == error for errors in self.worst.values() for error in errors)

    def add(self, part: Part, layer: int, sight: Sight | None) -> None:
        """Take in one part of one layer; None when no position could be compared."""
        self.worst[part].append(float(sight.figures.relative_l2.max()) if sight else float("nan"))
        if sight:
            errors, positions = sight.figures.by_position, sight.positions
            row = torch.full((self.by_block[part].shape[1],), -1.0, dtype=torch.float64)
            row = row.scatter_reduce(0, positions // self.width, errors.amax(dim=0), "amax")
            self.by_block[part][layer] = torch.where(row < 0, torch.nan, row)

    def heat_maps(self) -> list[dict[str, Any]]:
        """Layer by position block, keys and values."""
        starts = range(0, self.length, self.width)
        labels = [f"{begin}-{min(begin + self.width, self.length) - 1}" for begin in starts]
        return [
            _heat_map(f"Relative L2 error of {part}, worst head", "positions", labels, self.by_block[part])
            for part in PARTS
        ]


@dataclass
class Tables:
    """What all requests together say."""

    num_layers: int
    num_heads: int
    length: int
    """Of the longest request."""
    sums: dict[tuple[Part, int], Sums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.width = -(-self.length // MAX_POINTS)
        bins = -(-self.length // self.width)
        self.totals = {part: torch.zeros(bins, dtype=torch.float64) for part in PARTS}
        self.counts = {part: torch.zeros(bins, dtype=torch.float64) for part in PARTS}

    def add(self, sight: Sight) -> None:
        """Take in one part of one layer of a request."""
        part, figures = sight.part, sight.figures
        key = (part, sight.layer)
        self.sums[key] = self.sums[key] + figures.sums if key in self.sums else figures.sums
        bins = sight.positions // self.width
        self.totals[part].scatter_add_(0, bins, figures.by_position.square().mean(dim=0))
        self.counts[part].scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.float64))

    def data(self, limits: Limits) -> dict[str, Any]:
        """``series`` by layer and by position, and ``heat_maps`` of layer by head for each metric."""
        metrics = {part: self._metrics(part) for part in PARTS}
        heads = [*range(self.num_heads)]
        maps = [
            _heat_map(f"{_TITLES[name]} of {part}", "head", heads, metrics[part][name])
            for name in METRICS
            for part in PARTS
        ]
        for item in maps:
            if item["title"].startswith(_TITLES["relative_l2"]):
                item["limit"] = limits.head
            elif not item["title"].startswith(_TITLES["relative_linf"]):
                item["scale"] = "linear"
        return {"series": [self._by_layer(metrics, limits), self._by_position()], "heat_maps": maps}

    def _metrics(self, part: Part) -> dict[str, torch.Tensor]:
        found = {
            name: torch.full((self.num_layers, self.num_heads), torch.nan, dtype=torch.float64)
            for name in METRICS
        }
        for layer in range(self.num_layers):
            if (sums := self.sums.get((part, layer))) is not None:
                for name, numbers in sums.metrics().items():
                    found[name][layer] = numbers
        return found

    def _by_layer(self, metrics: dict[Part, dict[str, torch.Tensor]], limits: Limits) -> dict[str, Any]:
        lines = [
            {"name": part, "values": metrics[part]["relative_l2"].amax(dim=1).tolist()} for part in PARTS
        ]
        return {
            "title": "Where it begins: relative L2 error of the worst head, by layer",
            "x": {"name": "layer", "values": [*range(self.num_layers)]},
            "y": {"name": "relative L2 error"},
            "lines": lines,
            "limit": limits.head,
        }

    def _by_position(self) -> dict[str, Any]:
        lines = [
            {"name": part, "values": (self.totals[part] / self.counts[part]).sqrt().tolist()}
            for part in PARTS
        ]
        starts = [*range(0, self.length, self.width)]
        return {
            "title": "Relative L2 error by position, all layers, heads and prompts",
            "x": {"name": "position", "values": starts},
            "y": {"name": "relative L2 error"},
            "lines": lines,
        }


def _heat_map(title: str, columns: str, labels: Sequence[Any], values: torch.Tensor) -> dict[str, Any]:
    return {
        "title": title,
        "rows": {"name": "layer", "labels": [*range(len(values))]},
        "columns": {"name": columns, "labels": [*labels]},
        "values": values.tolist(),
    }
