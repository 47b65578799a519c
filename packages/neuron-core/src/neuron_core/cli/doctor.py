# SPDX-License-Identifier: Apache-2.0
"""``neuron doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from neuron_core.cli.commands import BrokenCommand, plugin_commands
from neuron_core.cli.output import cell, console, json_option, new_table, print_json

if TYPE_CHECKING:
    from neuron_core.doctor.check import Finding
    from neuron_core.doctor.report import Report

__all__ = ["doctor"]

_COLOURS = {"ok": "green", "info": "blue", "warn": "yellow", "fail": "bold red"}


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check this machine and say what is missing.

    Device, driver, packages, versions, memory, compile cache, settings.
    Exit code 0: healthy, warnings allowed. 1: a check failed. Nothing is changed.

    \b
    Examples:
      neuron doctor
      neuron doctor --json
      VLLM_NEURON_DEVICE=neuron neuron doctor
    """
    from neuron_core.doctor.report import Report, examine
    from neuron_core.environ import snapshot

    errors = console(stderr=True)
    with errors.status("") as status:
        report = examine(snapshot(), on_check=lambda name: status.update(f"looking at: {name}"))
    report = Report((*report.findings, *_broken_commands()))
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    ctx.exit(0 if report.healthy else 1)


def _print(report: Report) -> None:
    table = new_table("check", "status", "found", fold=("found",))
    for finding in report.findings:
        found = cell(finding.found)
        if finding.advice:
            found.append(f"\n→ {finding.advice}", style="italic")
        table.add_row(cell(finding.name), cell(finding.status, _COLOURS[finding.status]), found)
    console().print(table)
    failed = [finding for finding in report.findings if finding.status == "fail"]
    warned = sum(finding.status == "warn" for finding in report.findings)
    if report.healthy:
        device = next((finding.found for finding in report.findings if finding.name == "device"), "")
        click.echo(f"{click.style('healthy', fg='green')} ({warned} warnings). {device}")
    else:
        names = ", ".join(dict.fromkeys(finding.name for finding in failed))
        click.echo(f"{click.style('not healthy', fg='red', bold=True)} ({warned} warnings): {names}")


def _broken_commands() -> list[Finding]:
    """Commands that other packages add and that cannot be imported."""
    from neuron_core.doctor.check import Finding, Status

    loaded = {name: plugin.load() for name, plugin in plugin_commands().items()}
    return [
        Finding(
            "commands", Status.WARN, f"neuron {name}: {command.reason}", f"reinstall {command.distribution}"
        )
        for name, command in loaded.items()
        if isinstance(command, BrokenCommand)
    ]
