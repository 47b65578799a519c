# SPDX-License-Identifier: Apache-2.0
"""What every tool's command ends with: a table of findings, JSON if asked for, and the exit code."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from neuron_accuracy.cli.output import output, verdict_alone, write
from neuron_accuracy.cli.writable import writable_file
from neuron_accuracy.findings import Finding, Outcome, Severity, Verdict, write_outcome

__all__ = ["json_option", "say", "table_of"]

_STYLES = {Severity.FAULT: "bold red", Severity.ERROR: "bold yellow"}


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json FILE``, or ``-`` for standard output, where the table then is left out.

    Standard output is the verdict's alone while the command runs.
    """

    @functools.wraps(command)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with verdict_alone():
            return command(*args, **kwargs)

    return click.option(
        "--json",
        "json_to",
        metavar="FILE",
        callback=writable_file,
        help="Write the outcome as JSON; - is standard output, without the table.",
    )(quiet)


def say(outcome: Outcome, json_to: str | None, figures: Table | None = None) -> NoReturn:
    """Print the outcome, ``figures`` first, write it, and exit with its verdict: 0, 1 if it failed, 2 without one."""
    if json_to == "-":
        write(json.dumps(outcome.to_json(), indent=1, allow_nan=False) + "\n")
    else:
        if json_to is not None:
            write_outcome(outcome, Path(json_to))
        write(_printed(outcome, figures))
    sys.exit(outcome.exit_code)


def table_of(*columns: str) -> Table:
    """A table whose cells are folded and never cut: names are looked for, and copied, from here."""
    return Table(*(Column(name, overflow="fold") for name in columns))


def _printed(outcome: Outcome, figures: Table | None) -> str:
    """What findings say is text of models and files, and so never markup."""
    console = Console(file=output(), highlight=False)
    with console.capture() as printed:
        console.out(f"{outcome.title}: {outcome.test} against {outcome.reference}", highlight=False)
        if figures is not None:
            console.print(figures)
        if outcome.findings:
            console.print(_table(outcome))
        for line in _last(outcome):
            console.out(line, highlight=False)
    return printed.get()


def _table(outcome: Outcome) -> Table:
    table = table_of("level", "what", "where", "detail")
    for finding in outcome.findings:
        cells = (str(finding.level), finding.kind, finding.where, finding.detail)
        table.add_row(*map(Text, cells), style=_STYLES.get(finding.severity, ""))
    return table


def _last(outcome: Outcome) -> list[str]:
    """The verdict, after what to look at first on a line of its own, which a table of narrow columns would fold."""
    faults, errors = outcome.faults, outcome.errors
    failed = f"failed: {len(faults)} fault{'s' if len(faults) > 1 else ''}"
    aside = (
        f"; {len(errors)} {'things' if len(errors) > 1 else 'thing'} could not be compared" if errors else ""
    )
    said = {
        Verdict.FAILED: failed + aside,
        Verdict.ERROR: aside.removeprefix("; "),
        Verdict.LEFT_OUT: "nothing was compared",
        Verdict.PASSED: "passed",
    }
    return [*map(_line, (faults or errors)[:1]), said[outcome.verdict]]


def _line(finding: Finding) -> str:
    return f"first: {finding.where}: {finding.kind}: {' '.join(finding.detail.split())}"
