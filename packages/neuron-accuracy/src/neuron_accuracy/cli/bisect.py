# SPDX-License-Identifier: Apache-2.0
"""``neuron-accuracy bisect``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.cli.options import option_option, prompt_options, reference_option, test_option
from neuron_accuracy.cli.progress import progress_bar
from neuron_accuracy.cli.subjects import completed, opened, options_by_role, prompts_of
from neuron_accuracy.cli.verdict import json_option, say
from neuron_accuracy.errors import SubjectError
from neuron_accuracy.findings import Outcome
from neuron_accuracy.logits.prompts import encode_prompts
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
@test_option
@reference_option
@option_option
@prompt_options(2, 4)
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
        prompts = prompts_of(prompts_file, num_prompts, truth)
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
    with progress_bar("probes") as advance:
        return bisect(
            replaceable,
            expected,
            scratch / "reference",
            prompts,
            tokens,
            limit=limit if limit is not None else LIMITS.get(test.info().dtype, OTHER_LIMIT),
            patterns=patterns,
            names=(label(test.info()), label(reference.info())),
            progress=lambda done, total: advance(done, max(done, total)),
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
