# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy tasks``: whole answers, by lm-eval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.table import Table

from neuron_accuracy.cli.options import option_option, test_option
from neuron_accuracy.cli.progress import progress_bar
from neuron_accuracy.cli.subjects import opened, options_by_role
from neuron_accuracy.cli.verdict import json_option, say, table_of
from neuron_accuracy.cli.writable import writable_file
from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Outcome
from neuron_accuracy.subjects.protocol import Subject
from neuron_accuracy.subjects.server import ServerSubject
from neuron_accuracy.tasks.catalog import TASKS
from neuron_accuracy.tasks.check import check_tasks
from neuron_accuracy.tasks.evaluate import local_completions
from neuron_accuracy.tasks.thresholds import read_thresholds

__all__ = ["tasks_command"]

CLIENTS = ("subject", "local-completions")
_LOCAL = ",".join(name for name, info in TASKS.items() if info.local)


@click.command("tasks")
@test_option
@click.option("--reference", metavar="KIND:MODEL", help="What it is held against, sample by sample.")
@click.option(
    "--tasks",
    "names",
    default=_LOCAL,
    show_default=True,
    metavar="NAME,…",
    help=f"Of {', '.join(TASKS)}; all but the default ones take their items from a hub.",
)
@click.option("--thresholds", metavar="FILE", help="TOML, task.metric = minimum.")
@click.option("--limit", type=int, help="Only the first items of each task.")
@click.option(
    "--client",
    type=click.Choice(CLIENTS),
    default=CLIENTS[0],
    show_default=True,
    help="Who asks a server: its subject, or lm-eval's own client.",
)
@click.option(
    "--deviating",
    metavar="FILE",
    callback=writable_file,
    help="Write samples to look at as prompts, for logits --prompts.",
)
@option_option
@json_option
def tasks_command(
    test: str,
    reference: str | None,
    names: str,
    thresholds: str | None,
    limit: int | None,
    client: str,
    deviating: str | None,
    options: Sequence[str],
    json_to: str | None,
) -> NoReturn:
    """Score a model on tasks, against thresholds or a reference's answers.

    \b
      neuron-accuracy tasks --test server:http://localhost:8000/v1 --reference transformers:./smollm2
    """
    minimums = [] if thresholds is None else read_thresholds(Path(thresholds))
    texts = {"test": test} | ({} if reference is None else {"reference": reference})
    given = options_by_role(options, tuple(texts))
    with opened(texts, given) as subjects, progress_bar("requests", None) as advance:
        outcome = check_tasks(
            subjects["test"],
            [name.strip() for name in names.split(",") if name.strip()],
            reference=subjects.get("reference"),
            thresholds=minimums,
            limit=limit,
            client=_client(client, subjects["test"], given["test"]),
            progress=advance,
        )
    if deviating is not None:
        _write_prompts(outcome, Path(deviating))
    say(outcome, json_to, _scores(outcome))


def _client(client: str, test: Subject, options: dict[str, str]) -> Any:
    if client == CLIENTS[0]:
        return None
    if not isinstance(test, ServerSubject):
        raise AccuracyError(f"--client={client}: asks servers only; --test server:URL works")
    return local_completions(test.url, test.info().model, options.get("tokenizer", ""), test.authorization)


def _scores(outcome: Outcome) -> Table:
    """What each task was scored, beside what it was held against."""
    table = table_of("task", "metric", "value", "standard error", "minimum", "reference", "samples")
    for row in outcome.data["tasks"]:
        for metric, held in row["metrics"].items():
            names = ("value", "stderr", "minimum", "reference")
            figures = ("–" if held[name] is None else f"{held[name]:.4g}" for name in names)
            table.add_row(row["task"], metric, *figures, str(row["samples"]))
    return table


def _write_prompts(outcome: Outcome, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in outcome.data["deviating"]))
