# SPDX-License-Identifier: Apache-2.0
"""The command ``neuron-accuracy``: one subcommand per tool; the exit code is the verdict.

0: nothing was found; 1: a fault was found; 2: the comparison could not be made as asked; 130: it was interrupted.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Any

import click

from neuron_accuracy import __version__
from neuron_accuracy.errors import AccuracyError
from neuron_core.cli.group import load_command
from neuron_core.errors import NeuronError, unknown_name_hint

__all__ = ["COMMANDS", "cli", "main"]

COMMANDS = {
    "run": "neuron_accuracy.cli.run:run_command",
    "logits": "neuron_accuracy.cli.logits:logits_command",
    "compare": "neuron_accuracy.cli.compare:compare_command",
    "bisect": "neuron_accuracy.cli.bisect:bisect_command",
    "kv": "neuron_accuracy.cli.kv:kv_command",
    "replay": "neuron_accuracy.cli.replay:replay_command",
    "tasks": "neuron_accuracy.cli.tasks:tasks_command",
    "report": "neuron_accuracy.cli.report:report_command",
}


class _Tools(click.Group):
    """Imports a tool when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"no command {args[0]!r}: {unknown_name_hint(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # click would make a 1 of it, which is a fault's.
            raise AccuracyError("what reads this command's messages went away before its end") from error


@click.group(cls=_Tools, help=__doc__)
@click.version_option(__version__)
def cli() -> None:  # noqa: D103 -- the module's text is its help
    pass


def main() -> Any:
    """Run the command. What cannot be compared is one line on standard error; nothing but a verdict exits with 1."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _complain("Interrupted.\n")
        sys.exit(130)
    except (NeuronError, OSError) as error:
        _complain(f"Error: {error}\n")
        sys.exit(2)
    except Exception:  # a mistake of ours, or of a library: no verdict either
        _complain(traceback.format_exc())
        sys.exit(2)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        sys.stderr.write(text)
        sys.stderr.flush()
