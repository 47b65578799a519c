# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy run``: all levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import click

from neuron_accuracy.cli.options import option_option, prompt_options, reference_option, test_option
from neuron_accuracy.cli.subjects import ROLES, completed, opened, options_by_role, prompts_of
from neuron_accuracy.cli.verdict import json_option, say
from neuron_accuracy.cli.writable import writable_folder
from neuron_accuracy.findings import Outcome, write_outcome
from neuron_accuracy.logits.prompts import encode_prompts
from neuron_accuracy.run.triage import LEVELS, Roles, Triage, clear_outcomes
from neuron_accuracy.subjects.open import public_text
from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["run_command"]


@click.command("run")
@test_option
@reference_option
@click.option(
    "--baseline",
    metavar="KIND:MODEL",
    help="The same in higher precision; in transformers and float32 if the test has another dtype.",
)
@option_option
@prompt_options(6, 12)
@click.option(
    "--levels",
    metavar="NAME,…",
    help=f"Of {','.join(LEVELS)}; all that can be run if not given. One that is named and cannot is an error.",
)
@click.option("--tasks", metavar="NAME,…", help="Tasks of the widest level, such as cloze,arithmetic.")
@click.option("--thresholds", metavar="FILE", help="What tasks must reach, as TOML.")
@click.option("--task-limit", type=int, help="Samples of each task; all of them if not given.")
@click.option(
    "--out",
    "folder",
    default="neuron-accuracy",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    callback=writable_folder,
    help="Folder for outcomes, captures and report.html.",
)
@json_option
def run_command(
    test: str,
    reference: str | None,
    baseline: str | None,
    options: Sequence[str],
    prompts_file: str | None,
    num_prompts: int,
    tokens: int,
    levels: str | None,
    tasks: str | None,
    thresholds: str | None,
    task_limit: int | None,
    folder: Path,
    json_to: str | None,
) -> NoReturn:
    """Compare a run with a reference at every level, and say where to look first.

    Tasks, logits, sampling, KV caches and tensors; each level says more narrowly where the two part. KIND:MODEL is
    vllm-neuron:DIR, transformers:DIR, server:URL, or of a kind that an installed package adds.

    \b
      neuron-accuracy run --test vllm-neuron:./smollm2 --option test.dtype=float32
    """
    chosen = LEVELS if levels is None else _levels(levels)
    clear_outcomes(folder)
    texts, given = completed(test, reference, baseline, options_by_role(options, ROLES))
    with opened(texts, given) as subjects:
        roles = Roles(subjects["test"], subjects["reference"], subjects.get("baseline"))
        prompts = prompts_of(prompts_file, num_prompts, roles.truth)
        encoded = encode_prompts(prompts, *subjects.values())
        triage = Triage(
            roles,
            encoded,
            folder,
            tokens,
            chosen,
            demanded=() if levels is None else chosen,
            texts=[prompt.text for prompt in prompts],
            tasks=_tasks(roles, tasks, thresholds, task_limit),
            tell=lambda what: click.echo(f"{what} …", err=True),
        )
        outcomes = []
        for outcome in triage.run():
            outcomes.append(outcome)
            write_outcome(outcome, folder / f"{outcome.tool}.json")
        summary = triage.summary(outcomes)
    path = triage.write(outcomes, {role: public_text(text) for role, text in texts.items()})
    click.echo(f"report: {path}", err=True)
    say(summary, json_to)


def _levels(text: str) -> list[str]:
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in LEVELS:
            raise ConfigError("--levels", name, f"no such level; {unknown_name_hint(name, LEVELS)}")
    if not chosen:
        raise ConfigError("--levels", text, f"names no level; {','.join(LEVELS)} works")
    return chosen


def _tasks(
    roles: Roles, names: str | None, thresholds: str | None, limit: int | None
) -> Callable[[], Outcome] | None:
    if names is None:
        if thresholds is not None or limit is not None:
            raise ConfigError("--tasks", None, "names no task to limit; cloze,arithmetic works")
        return None
    from neuron_accuracy.tasks.check import check_tasks
    from neuron_accuracy.tasks.thresholds import read_thresholds

    chosen = [name.strip() for name in names.split(",") if name.strip()]
    minimums = [] if thresholds is None else read_thresholds(Path(thresholds))
    return lambda: check_tasks(roles.test, chosen, reference=roles.truth, thresholds=minimums, limit=limit)
