# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy logits``: a test and a reference forced along the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import click

from neuron_accuracy.cli.options import option_option, prompt_options, test_option
from neuron_accuracy.cli.progress import progress_bar
from neuron_accuracy.cli.subjects import opened, options_by_role, prompts_of
from neuron_accuracy.cli.verdict import json_option, say
from neuron_accuracy.logits.golden import GoldenCache
from neuron_accuracy.logits.limits import parse_limits
from neuron_accuracy.logits.prompts import encode_prompts
from neuron_accuracy.logits.validate import DEFAULT_TOP, validate_logits

__all__ = ["logits_command"]


@click.command("logits")
@test_option
@click.option("--reference", required=True, metavar="KIND:MODEL", help="What it is held against.")
@click.option(
    "--baseline",
    metavar="KIND:MODEL",
    help="A float32 model: three-way, where the reference is of the test's dtype and shows what that alone changes.",
)
@prompt_options(8, 16)
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
@option_option
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
        prompts = prompts_of(prompts_file, num_prompts, subjects["reference"])
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
