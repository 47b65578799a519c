# SPDX-License-Identifier: Apache-2.0
"""A group of commands that are imported when asked for, and what both our commands do with names and errors."""

from __future__ import annotations

import importlib
from typing import Any

import click

from neuron_core.errors import NeuronError, unknown_name_hint

__all__ = ["LateGroup", "load_command"]


def load_command(place: str) -> click.Command:
    """The command at ``module:attribute``."""
    module, _, attribute = place.partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


class LateGroup(click.Group):
    """Names the nearest command for one that does not exist; a ``NeuronError`` is one line and exit code 1."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest name for one that does not exist."""
        if not args[0].startswith("-") and args[0] not in (known := self.list_commands(ctx)):
            ctx.fail(f"no command {args[0]!r}: {unknown_name_hint(args[0], known)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except NeuronError as error:
            raise click.ClickException(str(error)) from error
