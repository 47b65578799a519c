# SPDX-License-Identifier: Apache-2.0
"""Whether subjects mean the same by a token id."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_accuracy.errors import AccuracyError, SubjectError
from neuron_accuracy.findings import Finding, Level, Severity
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.protocol import Subject

__all__ = ["check_same_tokens", "label"]

_UNTOLD = ("unknown", "none")


def label(info: SubjectInfo) -> str:
    """A subject in a few words."""
    degrees = "".join(f", {axis}={degree}" for axis, degree in sorted(info.parallel.items()))
    return f"{info.kind}:{info.model} ({info.dtype}{degrees})"


def check_same_tokens(
    test: Subject, reference: Subject, prompts: Sequence[Sequence[int]], named: str = "reference"
) -> list[Finding]:
    """Raise ``AccuracyError`` if the two have other vocabularies or read a prompt's ids as other texts.

    Notes say what could not be checked and that weights differ.
    """
    ours, theirs = reference.info(), test.info()
    if ours.vocab_size and theirs.vocab_size and ours.vocab_size != theirs.vocab_size:
        raise AccuracyError(
            f"the test's vocabulary has {theirs.vocab_size} tokens and the {named}'s {ours.vocab_size}: "
            f"{label(theirs)} and {label(ours)} are models of other kinds"
        )
    told = ours.tokenizer not in _UNTOLD and theirs.tokenizer not in _UNTOLD
    if told and ours.tokenizer != theirs.tokenizer:
        raise AccuracyError(
            f"the test's tokenizer is another than the {named}'s, so that a token id means another text in each: "
            f"{label(theirs)} and {label(ours)}"
        )
    notes: list[Finding] = []
    same_weights = ours.revision == theirs.revision != "unknown"
    if not told and not same_weights:
        notes += _compared_by_text(test, reference, prompts, named)
    if ours.revision != theirs.revision and "unknown" not in (ours.revision, theirs.revision):
        detail = f"the test has revision {theirs.revision[:12]} and the {named} {ours.revision[:12]}"
        notes.append(Finding(Level.INPUT, "other weights", label(theirs), detail, Severity.NOTE))
    return notes


def _compared_by_text(
    test: Subject, reference: Subject, prompts: Sequence[Sequence[int]], named: str
) -> list[Finding]:
    for index, prompt in enumerate(prompts):
        try:
            theirs, ours = test.decode(prompt), reference.decode(prompt)
        except SubjectError as error:
            detail = f"whether both mean the same by a token id could not be checked: {error}"
            return [Finding(Level.INPUT, "tokenizer not known", label(test.info()), detail, Severity.NOTE)]
        if theirs != ours:
            raise AccuracyError(
                f"prompt {index} is {ours[:80]!r} to the {named} and {theirs[:80]!r} to the test: "
                "they have other tokenizers"
            )
    return []
