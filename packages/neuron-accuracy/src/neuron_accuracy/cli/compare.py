# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy compare``: two captures, or two and a baseline."""

from __future__ import annotations

from pathlib import Path

import click

from neuron_accuracy.cli.options import capture_arguments
from neuron_accuracy.cli.progress import progress_bar
from neuron_accuracy.cli.verdict import json_option, say

__all__ = ["compare_command"]


@click.command("compare")
@capture_arguments
@json_option
def compare_command(test: Path, reference: Path, baseline: Path | None, json_to: str | None) -> None:
    """Find the first module of the capture TEST, in the order they ran, that parts from the capture REFERENCE."""
    # Torch takes a second to import, which the help of all commands need not wait for.
    from neuron_accuracy.compare.captures import compare_captures

    with progress_bar("tensors") as advance:
        outcome = compare_captures(test, reference, baseline, progress=advance)
    say(outcome, json_to)
