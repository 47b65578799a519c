# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy kv``: two captures' KV caches."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from neuron_accuracy.cli.verdict import json_option, say

__all__ = ["kv_command"]

_FOLDER = click.Path(path_type=Path)


@click.command("kv")
@click.argument("test", type=_FOLDER)
@click.argument("reference", type=_FOLDER)
@click.option(
    "--baseline",
    type=_FOLDER,
    help="A capture of higher precision, such as float32, that both are held against.",
)
@json_option
def kv_command(test: Path, reference: Path, baseline: Path | None, json_to: str | None) -> None:
    """Compare the KV caches in the captures TEST and REFERENCE by layer, head and position."""
    from neuron_accuracy.capture.reader import Capture
    from neuron_accuracy.kv.compare import compare_caches

    captures = [Capture(folder) for folder in (test, reference, baseline) if folder is not None]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("layers of requests", total=None)
        outcome = compare_caches(
            *captures, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    say(outcome, json_to)
