# SPDX-License-Identifier: Apache-2.0
"""The group ``vllm-neuron``: what a vLLM server with this plugin would do, can do, and does."""

from __future__ import annotations

from collections.abc import Mapping

import click

from neuron_core.cli.group import LateGroup, load_command
from vllm_neuron import __version__

__all__ = ["Refused", "ServeGroup", "main", "vllm_neuron"]

COMMANDS: Mapping[str, str] = {
    "config": "vllm_neuron.cli.config:config",
    "demo": "vllm_neuron.cli.demo:demo",
    "support": "vllm_neuron.cli.support:support",
}
"""Name -> ``module:attribute``, imported when asked for."""


class Refused(click.ClickException):
    """A configuration a server would refuse: one line, and exit code 2."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ServeGroup(LateGroup):
    """Commands by name, imported late; a ``NeuronError`` ends the program with one line and exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of every command."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        if cmd_name not in COMMANDS:
            return None
        return load_command(COMMANDS[cmd_name])


@click.group(
    cls=ServeGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="vllm-neuron")
def vllm_neuron() -> None:
    """Try the plugin, see what a server's flags become, and what is supported.

    \b
    Examples:
      vllm-neuron demo
      vllm-neuron config Qwen/Qwen3-0.6B --max-model-len 4096
      vllm-neuron support
    """


def main() -> None:
    """Entry point of the console script ``vllm-neuron``."""
    vllm_neuron(prog_name="vllm-neuron")
