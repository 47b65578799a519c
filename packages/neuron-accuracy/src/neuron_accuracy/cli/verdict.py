# SPDX-License-Identifier: Apache-2.0
"""What every tool's command ends with: a table of findings, JSON if asked for, and the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from neuron_accuracy.findings import Outcome, write_outcome

__all__ = ["json_option", "say"]


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json FILE``, or ``-`` for standard output, where the table then is left out."""
    return click.option(
        "--json",
        "json_to",
        metavar="FILE",
        help="Write the outcome as JSON; - is standard output, without the table.",
    )(command)


def say(outcome: Outcome, json_to: str | None) -> NoReturn:
    """Print the outcome, write it, and exit with its verdict: 0, or 1 if it failed."""
    if json_to == "-":
        print(json.dumps(outcome.to_json(), indent=1))
    else:
        _print(outcome)
        if json_to is not None:
            write_outcome(outcome, Path(json_to))
    sys.exit(0 if outcome.passed else 1)


def _print(outcome: Outcome) -> None:
    console = Console(soft_wrap=False)
    console.print(f"{outcome.title}: {outcome.test} against {outcome.reference}", highlight=False)
    if outcome.findings:
        table = Table("level", "what", "where", "detail")
        for finding in outcome.findings:
            style = "bold red" if finding in outcome.faults else ""
            table.add_row(str(finding.level), finding.kind, finding.where, finding.detail, style=style)
        console.print(table)
    count = len(outcome.faults)
    console.print("passed" if outcome.passed else f"failed: {count} fault{'s' if count > 1 else ''}")
