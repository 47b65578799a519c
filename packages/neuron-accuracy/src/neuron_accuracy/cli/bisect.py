# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy bisect``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.cli.logits import opened, options_by_role
from neuron_accuracy.cli.roles import completed
from neuron_accuracy.cli.verdict import json_option, say
from neuron_accuracy.errors import SubjectError
from neuron_accuracy.findings import Outcome
from neuron_accuracy.logits.prompts import default_prompts, encode_prompts, read_prompts
from neuron_accuracy.logits.same import check_same_tokens, label
from neuron_accuracy.replace.bisect import Replaceable, bisect
from neuron_accuracy.replace.eager import ReplaceableTransformers
from neuron_accuracy.subjects.protocol import Sampling, Subject
from neuron_accuracy.subjects.transformers import TransformersSubject

__all__ = ["bisect_command"]

LIMITS = {"float32": 1e-4, "float64": 1e-8}
"""Largest relative L2 difference of a row of logits that is agreement, by the test's dtype."""
OTHER_LIMIT = 0.05


@click.command("bisect")
@click.option("--test", required=True, metavar="KIND:MODEL", help="What is tested.")
@click.option(
    "--reference", metavar="KIND:MODEL", help="What it is held against; the test's model in transformers."
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="ROLE.NAME=VALUE",
    help="An option of a subject, such as test.tensor_parallel_size=2.",
)
@click.option(
    "--prompts", "prompts_file", metavar="FILE", help='A line each: {"text": …} or {"token_ids": […]}.'
)
@click.option("--num-prompts", default=2, show_default=True, help="Built-in prompts, if no file is given.")
@click.option("--tokens", default=4, show_default=True, help="Tokens after each prompt.")
@click.option(
    "--modules", default="**", show_default=True, help="Patterns of the modules that may be at fault."
)
@click.option(
    "--limit", type=float, help="Relative L2 difference of logits that is agreement; by dtype if not given."
)
@json_option
def bisect_command(
    test: str,
    reference: str | None,
    options: Sequence[str],
    prompts_file: str | None,
    num_prompts: int,
    tokens: int,
    modules: str,
    limit: float | None,
    json_to: str | None,
) -> NoReturn:
    """Find the module whose replacement by the reference's makes the logits agree.

    \b
      neuron-accuracy bisect --test vllm-neuron:./smollm2 --option test.dtype=float32
    """
    patterns = [name.strip() for name in modules.split(",") if name.strip()]
    texts, given = completed(test, reference, None, options_by_role(options, ("test", "reference")))
    texts.pop("baseline", None)
    with opened(texts, given) as subjects, tempfile.TemporaryDirectory(prefix="neuron-accuracy-") as scratch:
        held, truth = subjects["test"], subjects["reference"]
        prompts = (
            default_prompts(truth, num_prompts) if prompts_file is None else read_prompts(Path(prompts_file))
        )
        encoded = encode_prompts(prompts, truth, held)
        outcome = _bisect(held, truth, encoded, tokens, patterns, limit, Path(scratch))
    say(outcome, json_to)


def _bisect(
    test: Subject,
    reference: Subject,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    patterns: Sequence[str],
    limit: float | None,
    scratch: Path,
) -> Outcome:
    check_same_tokens(test, reference, prompts)
    replaceable = _replaceable(test)
    made = reference.generate(prompts, num_tokens, [Sampling()] * len(prompts), 1)
    tokens = [item.tokens for item in made]
    expected = reference.force(prompts, tokens, 0)
    reference.capture(prompts, tokens, CaptureSpec(tuple(patterns)), scratch / "reference")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("probes")
        return bisect(
            replaceable,
            expected,
            scratch / "reference",
            prompts,
            tokens,
            limit=limit if limit is not None else LIMITS.get(test.info().dtype, OTHER_LIMIT),
            patterns=patterns,
            names=(label(test.info()), label(reference.info())),
            progress=lambda done, total: bar.update(task, completed=done, total=max(done, total)),
        )


def _replaceable(test: Subject) -> Replaceable:
    if isinstance(test, TransformersSubject):
        return ReplaceableTransformers(test)
    if isinstance(test, Replaceable):
        return test
    kind = test.info().kind
    raise SubjectError(
        f"{kind}: nothing can be put into a run of this kind; vllm-neuron:DIR and transformers:DIR take it"
    )
