# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy replay``."""

from __future__ import annotations

from pathlib import Path

import click

from neuron_accuracy.cli.progress import progress_bar
from neuron_accuracy.cli.verdict import json_option, say

__all__ = ["replay_command"]


@click.command("replay")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--compiler", default="fx", show_default=True, help="fx, inductor or neuronx.")
@json_option
def replay_command(folder: Path, compiler: str, json_to: str | None) -> None:
    """Run the calls stored in FOLDER again, without the engine, and compare what they give.

    FOLDER is that of neuron_config.input_snapshots, or one step's or one call's in it. It holds code that is executed:
    replay only what you or your engine wrote.
    """
    from neuron_accuracy.snapshots.replay import replay
    from neuron_accuracy.snapshots.store import find_calls

    calls = find_calls(folder)
    with progress_bar("calls", len(calls)) as advance:
        outcome = replay(calls, compiler, progress=advance)
    say(outcome, json_to)
