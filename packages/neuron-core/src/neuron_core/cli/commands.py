# SPDX-License-Identifier: Apache-2.0
"""Commands that other packages add through the entry points group ``neuron_core.commands``."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass

import click

__all__ = ["GROUP", "BrokenCommand", "PluginCommand", "plugin_commands"]

GROUP = "neuron_core.commands"


class BrokenCommand(click.Command):
    """Stands for a command that cannot be used: listed with the reason, which running it gives as the error."""

    def __init__(self, name: str, distribution: str, reason: str) -> None:
        super().__init__(
            name,
            short_help=f"broken ({distribution}): {reason}",
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
        self.distribution = distribution
        self.reason = reason

    def invoke(self, ctx: click.Context) -> None:
        """Fail with the reason."""
        raise click.ClickException(f"the command {self.name!r} of {self.distribution}: {self.reason}")


@dataclass(frozen=True)
class PluginCommand:
    """An entry point and the distributions that declare its name, one unless two packages disagree."""

    entry_point: importlib.metadata.EntryPoint
    distributions: tuple[str, ...]

    @property
    def distribution(self) -> str:
        """Name of the package, or names."""
        return ", ".join(self.distributions)

    def load(self) -> click.Command:
        """Import the command; whatever its package raises is shown in its place, so that the others work."""
        name = self.entry_point.name
        if len(self.distributions) > 1:
            return BrokenCommand(name, self.distribution, "several packages add a command of this name")
        try:
            command = self.entry_point.load()
        except Exception as error:  # another package's code: anything may happen in it
            first_line = (str(error).splitlines() or [""])[0]
            return BrokenCommand(name, self.distribution, f"{type(error).__name__}: {first_line}")
        if not isinstance(command, click.Command):
            return BrokenCommand(name, self.distribution, f"{self.entry_point.value} is not a click command")
        return command


@functools.cache
def plugin_commands() -> dict[str, PluginCommand]:
    """Every declared command by name; nothing is imported."""
    found: dict[str, PluginCommand] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        owner = point.dist.name if point.dist is not None else point.value
        others = found[point.name].distributions if point.name in found else ()
        found[point.name] = PluginCommand(point, (*others, owner))
    return found
