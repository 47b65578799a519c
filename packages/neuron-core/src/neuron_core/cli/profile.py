# SPDX-License-Identifier: Apache-2.0
"""``neuron profile``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from neuron_core.cli.output import cell, console, json_option, new_table, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from neuron_core.profiling.summary import RankSummary

__all__ = ["profile"]

_IDLE = "idle / other"


@click.group()
def profile() -> None:
    """Read what /stop_profile wrote, and profile one graph on a chip.

    \b
    Examples:
      neuron profile summarize traces/rank0_20260131-120000.trace.json.gz
      neuron profile capture graph.neff
    """


@profile.command()
@click.argument("trace", type=click.Path(path_type=Path))
@json_option
def summarize(trace: Path, as_json: bool) -> None:
    """Say where the time of the profile TRACE went, per bucket.

    Every instant is counted once, so the rows of a rank add up to its wall time. What the host does while a step
    runs costs nothing and is not counted.

    \b
    graph     the compiled graph: number of runs, total, mean, 99th percentile
    sampling  tokens drawn on the host, and log-probabilities of prompts
    build     preparing a step's inputs
    schedule  the scheduler, output reading tokens, wait the engine waiting for the stream
    gap       between two steps, doing something else
    """
    from neuron_core.profiling.chrome import read_trace
    from neuron_core.profiling.summary import summarize as summarize_trace

    found = summarize_trace(read_trace(trace))
    if as_json:
        print_json({"trace": str(trace), "ranks": [rank.to_json() for rank in found]})
        return
    for rank in found:
        console().print(_table(rank))
        if rank.dropped:
            click.echo(f"{rank.dropped} slices were not kept; profile fewer steps (max_iterations)", err=True)


@profile.command()
@click.argument("neff", type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Profile to write; default: NEFF's .ntff."
)
@click.option("--timeout", default=600.0, show_default=True, help="Seconds the run may take.")
@json_option
def capture(neff: Path, output: Path | None, timeout: float, as_json: bool) -> None:
    """Run the compiled graph NEFF once on a Neuron core under neuron-explorer (not run on hardware)."""
    from neuron_core.profiling.explorer import Explorer

    ntff = Explorer.find().capture(neff, output or neff.with_suffix(".ntff"), timeout)
    if as_json:
        print_json({"neff": str(neff), "ntff": str(ntff)})
    else:
        click.echo(f"wrote {ntff}; look at it with neuron-explorer view")


def _table(rank: RankSummary) -> Table:
    from neuron_core.profiling.summary import COLUMNS

    numbers = ("count", "graph ms", "mean ms", "p99 ms", *(f"{c} ms" for c in COLUMNS), "total ms", "share")
    table = new_table(f"rank {rank.rank}", *numbers, right=numbers)
    wall = rank.wall or 1.0
    for row in rank.rows:
        count = len(row.executions)
        times = (row.graph, row.graph / max(count, 1), row.p99(), *(row.spent[c] for c in COLUMNS), row.total)
        table.add_row(
            cell(row.bucket), str(count), *(f"{t / 1e3:.2f}" for t in times), f"{row.total / wall:.1%}"
        )
    blank = [""] * (len(numbers) - 2)
    table.add_row(_IDLE, *blank, f"{rank.idle / 1e3:.2f}", f"{rank.idle / wall:.1%}")
    table.add_section()
    table.add_row("wall", *blank, f"{rank.wall / 1e3:.2f}", "")
    return table
