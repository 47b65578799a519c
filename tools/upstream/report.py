# SPDX-License-Identifier: Apache-2.0
"""What a run of vLLM's tests found: a table for people, the same as JSON, and what has to be done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .expectations import KINDS, RUNNABLE
from .verdict import LEAST_SHARE, Verdict, share

COLUMNS = ("passed", "failed", "listed", "of them runnable", "skipped", "passed of runnable", "seconds")


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the table, what the listed tests are listed for, and each thing that fails the session."""
    table = Table(title="vLLM's own tests on this platform")
    table.add_column("folder")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for verdict in verdicts:
        table.add_row(verdict.folder, *_cells([verdict]))
    if len(verdicts) > 1:
        table.add_section()
        table.add_row("all", *_cells(verdicts))
    console.print(table)
    for kind, sentence in KINDS.items():
        if count := sum(verdict.by_kind[kind] for verdict in verdicts):
            console.print(f"{count:5} listed: {kind}, {sentence}", highlight=False)
    for verdict in verdicts:
        _complain(verdict, console)
    if (passed := share(verdicts)) < LEAST_SHARE:
        console.print(
            f"[red]{passed:.1%} of the tests that can run passed[/]; at least {LEAST_SHARE:.0%} should"
        )


def _complain(verdict: Verdict, console: Console) -> None:
    for node_id, message in verdict.failed.items():
        console.print(f"[red]failed, not listed:[/] {escape(node_id)}\n    {escape(message)}", soft_wrap=True)
    for node_id in verdict.needless:
        console.print(f"[red]listed, but passed:[/] {escape(node_id)}", soft_wrap=True)
    for pattern in verdict.stale:
        console.print(f"[red]listed, but matches no test:[/] {escape(pattern)}", soft_wrap=True)


def _cells(verdicts: Sequence[Verdict]) -> list[str]:
    passed = sum(len(verdict.passed) for verdict in verdicts)
    can_run = sum(verdict.can_run for verdict in verdicts)
    counts = [
        passed,
        sum(len(verdict.failed) for verdict in verdicts),
        sum(len(verdict.listed) for verdict in verdicts),
        sum(verdict.by_kind[kind] for verdict in verdicts for kind in RUNNABLE),
        sum(len(verdict.skipped) for verdict in verdicts),
    ]
    part = f"{passed / can_run:.1%}" if can_run else "–"
    return [*map(str, counts), part, f"{sum(verdict.seconds for verdict in verdicts):.0f}"]


def write(verdicts: Sequence[Verdict], path: Path) -> None:
    """Write the counts and every name that is not simply a pass."""
    document = {
        verdict.folder: {
            "passed": len(verdict.passed),
            "can_run": verdict.can_run,
            "failed": verdict.failed,
            "listed": {name: f"{each.kind}: {each.reason}" for name, each in verdict.listed.items()},
            "skipped": verdict.skipped,
            "needless": verdict.needless,
            "stale": verdict.stale,
            "seconds": round(verdict.seconds, 1),
        }
        for verdict in verdicts
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
