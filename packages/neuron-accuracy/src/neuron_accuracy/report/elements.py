# SPDX-License-Identifier: Apache-2.0
"""What a page is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from neuron_accuracy.report.numbers import Cell

__all__ = ["Block", "Chart", "Facts", "Group", "Line", "Table"]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    title: str
    items: Sequence[tuple[str, Cell]]
    kind: str = "facts"


@dataclass(frozen=True)
class Table:
    """Rows under column headings; with ``headed`` the first cell of a row is its heading."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    headed: bool = True
    kind: str = "table"

    @property
    def numeric(self) -> list[bool]:
        """Per column, whether it holds numbers, which stand at its right."""
        return [
            any(row[place].number for row in self.rows if place < len(row))
            for place in range(len(self.columns))
        ]


@dataclass(frozen=True)
class Line:
    """One line of a chart; None where there is no number."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Chart:
    """A heat map (``cells``) or a line chart (``lines``), and the table of the same numbers."""

    title: str
    x: str
    y: str
    xs: Sequence[Any]
    table: Table
    lines: Sequence[Line] = ()
    ys: Sequence[Any] = ()
    cells: Sequence[Sequence[float | None]] = ()
    limit: float | None = None
    linear: bool = False
    """Never on a logarithmic scale."""
    others: Sequence[tuple[str, Cell]] = ()
    """Whatever else the data says of it."""
    kind: str = "chart"


@dataclass(frozen=True)
class Group:
    """Blocks under a heading that can be folded."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)
    kind: str = "group"


Block = Facts | Table | Chart | Group
