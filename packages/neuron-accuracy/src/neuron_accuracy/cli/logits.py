# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy logits``: a test and a reference forced along the same tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from neuron_accuracy.cli.verdict import json_option, say
from neuron_accuracy.logits.golden import GoldenCache
from neuron_accuracy.logits.limits import parse_limits
from neuron_accuracy.logits.prompts import Prompt, default_prompts, encode_prompts, read_prompts
from neuron_accuracy.logits.validate import DEFAULT_TOP, validate_logits
from neuron_accuracy.subjects.open import open_subject
from neuron_accuracy.subjects.protocol import Subject
from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["logits_command", "opened", "options_by_role", "progress_bar"]

ROLES = ("test", "reference", "baseline")


@click.command("logits")
@click.option("--test", required=True, metavar="KIND:MODEL", help="What is tested.")
@click.option("--reference", required=True, metavar="KIND:MODEL", help="What it is held against.")
@click.option(
    "--baseline",
    metavar="KIND:MODEL",
    help="A float32 model: three-way, where the reference is of the test's dtype and shows what that alone changes.",
)
@click.option(
    "--prompts", "prompts_file", metavar="FILE", help='A line each: {"text": …} or {"token_ids": […]}.'
)
@click.option("--num-prompts", default=8, show_default=True, help="Built-in prompts, if no file is given.")
@click.option("--tokens", default=16, show_default=True, help="Tokens after each prompt.")
@click.option(
    "--top",
    default=DEFAULT_TOP,
    show_default=True,
    help="Log-probabilities to ask for where whole rows are not given.",
)
@click.option(
    "--limits", metavar="K=LIMIT,…", help="Other limits than for the dtypes, such as 5=0.011,all=0.05."
)
@click.option(
    "--golden",
    metavar="URL",
    help="Keep what reference and baseline say in a directory, or where fsspec can.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="ROLE.NAME=VALUE",
    help="An option of a subject, such as test.dtype=bfloat16.",
)
@json_option
def logits_command(
    test: str,
    reference: str,
    baseline: str | None,
    prompts_file: str | None,
    num_prompts: int,
    tokens: int,
    top: int,
    limits: str | None,
    golden: str | None,
    options: Sequence[str],
    json_to: str | None,
) -> NoReturn:
    """Hold the logits of a test against a reference's, both forced along the reference's greedy tokens.

    KIND:MODEL is transformers:DIR, server:URL, or of a kind that an installed package adds.

    \b
      neuron-accuracy logits --test server:http://localhost:8000/v1 --reference transformers:./smollm2
    """
    allowed = None if limits is None else parse_limits("--limits", limits)
    texts = {"test": test, "reference": reference} | ({} if baseline is None else {"baseline": baseline})
    with opened(texts, options_by_role(options, tuple(texts))) as subjects:
        others = [subject for role, subject in subjects.items() if role != "reference"]
        prompts = _prompts(prompts_file, num_prompts, subjects["reference"])
        encoded = encode_prompts(prompts, subjects["reference"], *others)
        with progress_bar("prompts", len(encoded)) as advance:
            outcome = validate_logits(
                subjects["test"],
                subjects["reference"],
                encoded,
                tokens,
                baseline=subjects.get("baseline"),
                limits=allowed,
                top=top,
                golden=None if golden is None else GoldenCache(golden),
                texts=[prompt.text for prompt in prompts],
                progress=advance,
            )
    say(outcome, json_to)


def options_by_role(
    options: Sequence[str], roles: Sequence[str] = ROLES, flag: str = "--option"
) -> dict[str, dict[str, str]]:
    """``test.dtype=bfloat16`` as ``{"test": {"dtype": "bfloat16"}}``; raises ``ConfigError``."""
    given: dict[str, dict[str, str]] = {role: {} for role in roles}
    for option in options:
        name, equals, value = option.partition("=")
        role, dot, setting = name.partition(".")
        if not equals or not dot or not setting:
            raise ConfigError(flag, option, f"must be ROLE.NAME=VALUE; {roles[0]}.dtype=bfloat16 works")
        if role not in given:
            raise ConfigError(flag, option, f"no such role here; {unknown_name_hint(role, roles)}")
        given[role][setting] = value
    return given


@contextlib.contextmanager
def opened(
    texts: Mapping[str, str], options: Mapping[str, Mapping[str, str]]
) -> Iterator[dict[str, Subject]]:
    """Subjects by role, closed at the end."""
    with contextlib.ExitStack() as stack:
        subjects: dict[str, Subject] = {}
        for role, text in texts.items():
            subjects[role] = open_subject(text, options.get(role, {}))
            stack.callback(subjects[role].close)
        yield subjects


@contextlib.contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error if that is a terminal; called with what is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _prompts(path: str | None, count: int, reference: Subject) -> list[Prompt]:
    return default_prompts(reference, count) if path is None else read_prompts(Path(path))
