# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy report``: outcomes as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from neuron_accuracy.findings import read_outcome

__all__ = ["report_command"]


@click.command("report")
@click.argument("outcomes", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="OUTCOME.json…")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The HTML file to write.",
)
@click.option("--title", default="Accuracy report", show_default=True, help="The page's heading.")
def report_command(outcomes: tuple[Path, ...], output: Path, title: str) -> None:
    """Draw what tools wrote with --json as one HTML page that needs no network. The exit code is their verdict."""
    from neuron_accuracy.report.write import write_report

    read = [read_outcome(path) for path in outcomes]
    write_report(read, output, title=title)
    faults = sum(len(outcome.faults) for outcome in read)
    click.echo(f"{output}: {'passed' if not faults else f'failed: {faults} fault' + 's' * (faults > 1)}")
    sys.exit(1 if faults else 0)
