# SPDX-License-Identifier: Apache-2.0
"""The group ``neuron``: its own commands and those that other packages add."""

from __future__ import annotations

from collections.abc import Mapping

import click

from neuron_core import __version__
from neuron_core.cli.commands import BrokenCommand, plugin_commands
from neuron_core.cli.group import LateGroup, load_command

__all__ = ["NeuronGroup", "main", "neuron"]

BUILT_IN: Mapping[str, str] = {
    "cache": "neuron_core.cli.cache:cache",
    "doctor": "neuron_core.cli.doctor:doctor",
    "profile": "neuron_core.cli.profile:profile",
}
"""This package's commands: name -> ``module:attribute``, imported when asked for."""


class NeuronGroup(LateGroup):
    """Commands by name, imported late; a ``NeuronError`` ends the program with one line and exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of every command, those of other packages included."""
        return sorted({*BUILT_IN, *plugin_commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; one that cannot be imported is replaced by a ``BrokenCommand``."""
        plugin = plugin_commands().get(cmd_name)
        if cmd_name in BUILT_IN:
            if plugin is not None:
                taken = f"neuron-core has a command of this name; rename the one of {plugin.distribution}"
                return BrokenCommand(cmd_name, plugin.distribution, taken)
            return load_command(BUILT_IN[cmd_name])
        return None if plugin is None else plugin.load()


@click.group(
    cls=NeuronGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="neuron")
def neuron() -> None:
    """Compile models ahead of time, look after what was compiled, and check this machine.

    \b
    Examples:
      neuron doctor
      neuron cache ls
      neuron cache explain 9f2c 41ab
    """


def main() -> None:
    """Entry point of the console script ``neuron``."""
    neuron(prog_name="neuron")
