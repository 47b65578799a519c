# SPDX-License-Identifier: Apache-2.0
"""Options and arguments that several tools share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

__all__ = ["capture_arguments", "option_option", "prompt_options", "reference_option", "test_option"]

Command = Callable[..., Any]
_CAPTURE = click.Path(path_type=Path)

test_option = click.option("--test", required=True, metavar="KIND:MODEL", help="What is tested.")
reference_option = click.option(
    "--reference", metavar="KIND:MODEL", help="What it is held against; the test's model in transformers."
)
option_option = click.option(
    "--option",
    "options",
    multiple=True,
    metavar="ROLE.NAME=VALUE",
    help="An option of a subject, such as test.dtype=bfloat16.",
)


def prompt_options(count: int, tokens: int) -> Callable[[Command], Command]:
    """``--prompts``, ``--num-prompts`` and ``--tokens``, with their defaults."""

    def add(command: Command) -> Command:
        for option in (
            click.option("--tokens", default=tokens, show_default=True, help="Tokens after each prompt."),
            click.option(
                "--num-prompts",
                default=count,
                show_default=True,
                help="Built-in prompts, if no file is given.",
            ),
            click.option(
                "--prompts",
                "prompts_file",
                metavar="FILE",
                help='A line each: {"text": …} or {"token_ids": […]}.',
            ),
        ):
            command = option(command)
        return command

    return add


def capture_arguments(command: Command) -> Command:
    """The folders TEST and REFERENCE of two captures, and ``--baseline``."""
    baseline = click.option(
        "--baseline",
        type=_CAPTURE,
        help="A capture of higher precision: errors are then held against the reference's own.",
    )
    return click.argument("test", type=_CAPTURE)(
        click.argument("reference", type=_CAPTURE)(baseline(command))
    )
