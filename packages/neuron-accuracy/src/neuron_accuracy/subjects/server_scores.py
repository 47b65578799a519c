# SPDX-License-Identifier: Apache-2.0
"""Scores out of a server's answers, whichever of the forms in use they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from neuron_accuracy.errors import SubjectError
from neuron_accuracy.subjects.protocol import Scores

__all__ = ["Names", "completion_rows", "prompt_rows", "scores_of_rows"]

Names = Callable[[str], int]
"""From a token as the server writes it, ``token_id:5`` or its text, to its id."""

Row = Mapping[int, float]
"""Log-probabilities of the likeliest tokens of one position, and of the token there, by id."""


def completion_rows(choice: Mapping[str, Any], names: Names, url: str) -> tuple[list[int], list[Row]]:
    """Tokens and rows of a completion's ``logprobs``; of the echoed prompt's first token the row is empty.

    Raises ``SubjectError`` if there are none, or of another form.
    """
    logprobs = choice.get("logprobs")
    with _read(url, "logprobs", logprobs):
        if not logprobs or not logprobs.get("tokens") or not logprobs.get("top_logprobs"):
            raise SubjectError(
                f"{url}: answers without log-probabilities; a server that returns them (logprobs=1) works"
            )
        tokens = [_id(names(token)) for token in logprobs["tokens"]]
        rows: list[Row] = []
        for token, own, top in zip(tokens, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
            row = {_id(names(name)): _number(value) for name, value in (top or {}).items()}
            rows.append({token: _number(own), **row} if top else row)
        return tokens, rows


def prompt_rows(choice: Mapping[str, Any], url: str) -> list[Row] | None:
    """Rows of vLLM's ``prompt_logprobs``, the first empty; None if the answer has none.

    Raises ``SubjectError`` if they are of another form.
    """
    given = choice.get("prompt_logprobs")
    if not given:
        return None
    with _read(url, "prompt_logprobs", given):
        return [
            {_id(int(token)): _number(item["logprob"]) for token, item in (position or {}).items()}
            for position in given
        ]


def scores_of_rows(begin: int, tokens: Sequence[int], rows: Sequence[Row], top: int, url: str) -> Scores:
    """Scores with ``top`` columns. A token that its row lacks has a log-probability of NaN: the server did not say.

    Raises ``SubjectError`` if a row holds fewer than ``top``.
    """
    if short := [len(row) for row in rows if len(row) < top]:
        raise SubjectError(
            f"{url}: gives {min(short)} log-probabilities, the token's own among them, where {top} were asked for; "
            f"ask for {max(min(short) - 1, 1)}"
        )
    # NaN first: a row that has one must not lose it among the unlikely.
    ranked = [
        sorted(row.items(), key=lambda item: (item[1] == item[1], -item[1], item[0]))[:top] for row in rows
    ]
    chosen = [row.get(token, float("nan")) for token, row in zip(tokens, rows, strict=True)]
    shape = (len(rows), top)
    ids = torch.tensor([[token for token, _ in row] for row in ranked], dtype=torch.int64).reshape(shape)
    values = torch.tensor([[value for _, value in row] for row in ranked]).reshape(shape)
    return Scores(begin, torch.tensor(chosen, dtype=torch.float32), ids, values.float())


@contextmanager
def _read(url: str, name: str, given: Any) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise SubjectError(
            f"{url}: its {name} cannot be read ({type(error).__name__}: {error}) in {given!r:.200}; a server that "
            "answers as OpenAI's or vLLM's completions do works"
        ) from error


def _id(token: int) -> int:
    if not 0 <= token < 2**31:
        raise ValueError(f"{token} is no token id")
    return token


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
