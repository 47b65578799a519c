# SPDX-License-Identifier: Apache-2.0
"""Prompts: from a file, built in, or random token ids for a model without a tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_accuracy.errors import AccuracyError, SubjectError
from neuron_accuracy.subjects.protocol import Subject

__all__ = ["BUILT_IN", "Prompt", "default_prompts", "encode_prompts", "read_prompts"]

BUILT_IN = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a little girl who",
    "Q: What is 17 plus 25?\nA:",
    "The three primary colours are red,",
    "In the year 1969, the first people",
    '{"name": "Ada", "age": 36, "languages": [',
    "To make a cup of tea, first",
    "The opposite of hot is",
    "It was the best of times, it was the worst of times, it was",
    "El perro corre por el parque y",
    "1, 1, 2, 3, 5, 8, 13,",
    "SELECT name, COUNT(*) FROM visits",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondrion is the part of the cell that",
)
"""Short texts of several kinds: facts, arithmetic, code, JSON, a letter, other languages."""

_RANDOM_LENGTHS = (4, 24)


@dataclass(frozen=True)
class Prompt:
    """A text, token ids, or both."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """One JSON object a line, ``{"text": …}`` or ``{"token_ids": […]}``; other keys are not read.

    Raises ``AccuracyError`` that names file and line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AccuracyError(f"{path}: {error}") from error
    prompts = [_prompt(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise AccuracyError(f'{path}: no prompts; a line such as {{"text": "Hello"}} works')
    return prompts


def default_prompts(subject: Subject, count: int, seed: int = 0) -> list[Prompt]:
    """``count`` built-in texts, repeated with a number before them if there are fewer; for a subject without a
    tokenizer random token ids of its vocabulary, the same for the same seed.
    """
    if count < 1:
        raise AccuracyError(f"{count} prompts; 1 works")
    try:
        subject.encode(BUILT_IN[0])
    except SubjectError:
        return _random_prompts(subject, count, seed)
    rounds = ((at // len(BUILT_IN), BUILT_IN[at % len(BUILT_IN)]) for at in range(count))
    return [Prompt(f"{turn}. {text}" if turn else text) for turn, text in rounds]


def encode_prompts(prompts: Sequence[Prompt], *subjects: Subject) -> list[list[int]]:
    """Token ids by the first subject. Raises ``AccuracyError`` if another that can encode makes others of a text."""
    encoded: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        if prompt.token_ids is not None:
            encoded.append(list(prompt.token_ids))
            continue
        ids = subjects[0].encode(prompt.text or "")
        for other in subjects[1:]:
            theirs = _encoded(other, prompt.text or "")
            if theirs is not None and theirs != ids:
                names = [f"{one.info().kind}:{one.info().model}" for one in (subjects[0], other)]
                raise AccuracyError(
                    f"prompt {index} {prompt.text!r:.80} is {ids[:12]} to {names[0]} and {theirs[:12]} to {names[1]}: "
                    "they have other tokenizers"
                )
        encoded.append(ids)
    return encoded


def _encoded(subject: Subject, text: str) -> list[int] | None:
    try:
        return subject.encode(text)
    except SubjectError:
        return None


def _prompt(place: str, line: str) -> Prompt:
    works = '{"text": "Hello"} or {"token_ids": [1, 2]} works'
    try:
        data: Any = json.loads(line)
    except ValueError as error:
        raise AccuracyError(f"{place}: no JSON ({error}); {works}") from error
    if not isinstance(data, dict):
        raise AccuracyError(f"{place}: no JSON object; {works}")
    text, ids = data.get("text"), data.get("token_ids")
    if ids is not None and not (
        isinstance(ids, list) and ids and all(isinstance(item, int) and item >= 0 for item in ids)
    ):
        raise AccuracyError(f"{place}: token_ids={ids!r:.80} is no list of token ids; {works}")
    if (text is not None and not isinstance(text, str)) or (ids is None and not text):
        raise AccuracyError(f"{place}: no text and no token ids; {works}")
    return Prompt(text, None if ids is None else tuple(ids))


def _random_prompts(subject: Subject, count: int, seed: int) -> list[Prompt]:
    size = subject.info().vocab_size
    if size < 1:
        raise AccuracyError(
            f"{subject.info().model} tells neither tokenizer nor vocabulary; give a file of prompts"
        )
    source = random.Random(seed)
    lengths = [source.randint(*_RANDOM_LENGTHS) for _ in range(count)]
    return [Prompt(None, tuple(source.randrange(size) for _ in range(length))) for length in lengths]
