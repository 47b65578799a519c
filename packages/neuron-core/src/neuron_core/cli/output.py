# SPDX-License-Identifier: Apache-2.0
"""What every command prints with, and the option types sizes and ages are given in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neuron_core.environ import size_in_bytes
from neuron_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "AGE",
    "SIZE",
    "cell",
    "console",
    "format_age",
    "format_bytes",
    "json_option",
    "new_table",
    "print_json",
    "progress_bar",
]

_PIPE_WIDTH = 200
_AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else size_in_bytes("size", value)
        except ConfigError as error:
            self.fail(f"{error.value!r} {error.hint}", param, ctx)


class _Age(click.ParamType[float]):
    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", value)
        if match is None:
            self.fail(f"{value!r} is not an age; 30d works (units: {', '.join(_AGE_UNITS)})", param, ctx)
        return float(match[1]) * _AGE_UNITS[match[2]]


SIZE = _Size()
"""Option type: a size such as ``5GiB`` or ``500MB``, in bytes."""

AGE = _Age()
"""Option type: an age such as ``30d`` or ``12h``, in seconds."""


def json_option(function: _Function) -> _Function:
    """The option ``--json`` that every command takes; its function gets ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")(
        function
    )


def print_json(data: Any) -> None:
    """Print one JSON document on standard output."""
    click.echo(json.dumps(data, indent=2))


def console(stderr: bool = False) -> Console:
    """A console; when its output goes into a file or a pipe, lines are not broken at 80 columns."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)


def new_table(*columns: str, right: Iterable[str] = (), fold: Iterable[str] = ()) -> Table:
    """An empty table; columns in ``right`` hold numbers, those in ``fold`` may break over several lines."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: Any = "right" if column in set(right) else "left"
        table.add_column(column, justify=justify, no_wrap=column not in set(fold), overflow="fold")
    return table


def cell(text: str, style: str = "") -> Text:
    """Text as it stands: square brackets in it are no markup."""
    from rich.text import Text

    return Text(text, style=style)


def progress_bar(*, hidden: bool, of_bytes: bool = False) -> Progress:
    """A bar on standard error, over bytes or over whole things; ``hidden`` for ``--json``, and off a terminal."""
    from rich import progress

    count = progress.DownloadColumn() if of_bytes else progress.MofNCompleteColumn()
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        count,
        progress.TimeElapsedColumn(),
    )
    where = console(stderr=True)
    return progress.Progress(*columns, console=where, disable=hidden or not where.is_terminal)


def format_bytes(count: float) -> str:
    """A size for people, in binary units: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_age(seconds: float) -> str:
    """A span of time for people, in its largest whole unit: ``3 d``."""
    for unit in ("d", "h", "m"):
        if seconds >= _AGE_UNITS[unit]:
            return f"{seconds // _AGE_UNITS[unit]:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
