# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy kv``: two captures' KV caches."""

from __future__ import annotations

from pathlib import Path

import click

from neuron_accuracy.cli.options import capture_arguments
from neuron_accuracy.cli.progress import progress_bar
from neuron_accuracy.cli.verdict import json_option, say

__all__ = ["kv_command"]


@click.command("kv")
@capture_arguments
@json_option
def kv_command(test: Path, reference: Path, baseline: Path | None, json_to: str | None) -> None:
    """Compare the KV caches in the captures TEST and REFERENCE by layer, head and position."""
    from neuron_accuracy.capture.reader import Capture
    from neuron_accuracy.kv.compare import compare_caches

    captures = [Capture(folder) for folder in (test, reference, baseline) if folder is not None]
    with progress_bar("layers of requests") as advance:
        outcome = compare_caches(*captures, progress=advance)
    say(outcome, json_to)
