# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy report``: outcomes as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from neuron_accuracy.cli.output import write
from neuron_accuracy.cli.writable import writable_file
from neuron_accuracy.findings import read_outcome

__all__ = ["report_command"]


@click.command("report")
@click.argument("outcomes", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="OUTCOME.json…")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    callback=writable_file,
    help="The HTML file to write.",
)
@click.option("--title", default="Accuracy report", show_default=True, help="The page's heading.")
def report_command(outcomes: tuple[Path, ...], output: str, title: str) -> None:
    """Draw what tools wrote with --json as one HTML page that needs no network. The exit code is their verdict."""
    from neuron_accuracy.report.write import write_report

    read = [read_outcome(path) for path in outcomes]
    write_report(read, Path(output), title=title)
    # A summary repeats what the outcomes beside it say.
    faults = len({(fault.kind, fault.where, fault.detail) for outcome in read for fault in outcome.faults})
    codes = {outcome.exit_code for outcome in read}
    code = next(code for code in (1, 2, 0) if code in codes)
    said = {
        0: "passed",
        1: f"failed: {faults} fault{'s' if faults > 1 else ''}",
        2: "not all could be compared",
    }
    write(f"{output}: {said[code]}\n")
    sys.exit(code)
