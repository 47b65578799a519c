# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy compare``: two captures, or two and a baseline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from neuron_accuracy.cli.verdict import json_option, say

if TYPE_CHECKING:
    from neuron_accuracy.compare.captures import Progress as Report

__all__ = ["compare_command"]

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("compare")
@click.argument("test", type=_FOLDER)
@click.argument("reference", type=_FOLDER)
@click.option(
    "--baseline",
    type=_FOLDER,
    help="A capture of the reference in higher precision: errors are then held against the reference's own.",
)
@json_option
def compare_command(test: Path, reference: Path, baseline: Path | None, json_to: str | None) -> None:
    """Find the first module of the capture TEST, in the order they ran, that parts from the capture REFERENCE."""
    # Torch takes a second to import, which the help of all commands need not wait for.
    from neuron_accuracy.compare.captures import compare_captures

    with _bar() as report:
        outcome = compare_captures(test, reference, baseline, progress=report)
    say(outcome, json_to)


@contextmanager
def _bar() -> Iterator[Report | None]:
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("comparing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        yield lambda done, total, name: progress.update(task, completed=done, total=total, description=name)
