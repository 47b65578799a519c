# SPDX-License-Identifier: Apache-2.0
"""Progress of a tool, on standard error if that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Advance", "progress_bar"]


class Advance(Protocol):
    """Called with how many are done and, where that was not known before, of how many and what is next."""

    def __call__(self, done: int, total: int | None = None, what: str | None = None, /) -> None:
        """Move the bar."""
        ...


@contextlib.contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Advance]:
    """A bar while the block runs."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def advance(done: int, total: int | None = None, what: str | None = None, /) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield advance
