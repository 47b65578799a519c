# SPDX-License-Identifier: Apache-2.0
"""What a run that is compared can do. An implementation needs no base class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.subjects.info import SubjectInfo

__all__ = ["ENTRY_POINTS", "Generation", "Opener", "Sampling", "Scores", "Subject"]

ENTRY_POINTS = "neuron_accuracy.subjects"
"""Entry point group of ``open(model, options) -> Subject`` callables, by kind of subject."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """What a model says of the tokens of one sequence from ``begin`` on, each given those before it.

    Row i belongs to the token at position ``begin + i``. With whole rows ``logits`` is float32 ``[n, V]``. Otherwise it
    is None and ``top_ids`` int64 and ``top_logprobs`` float32 ``[n, k]`` hold the likeliest, in falling order.
    """

    begin: int
    chosen_logprobs: torch.Tensor
    """float32 ``[n]``, of the tokens that the sequence has."""
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    logits: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Generation:
    """What was drawn after one prompt, and the scores each token was drawn from (``begin`` is the prompt's length)."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: Scores


class Subject(Protocol):
    """A run of a model. A method that ``info().abilities`` does not name raises ``SubjectError``."""

    def info(self) -> SubjectInfo:
        """Who it is."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens as a prompt has them."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, sampling: Sequence[Sampling], top: int
    ) -> list[Generation]:
        """Exactly ``num_tokens`` tokens after each prompt, ends of text ignored.

        Each comes with ``top`` scores, or with whole rows if that is 0.
        """
        ...

    def force(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], top: int
    ) -> list[Scores]:
        """Scores of given continuations, one token after the other as a generation meets them; ``top`` as above."""
        ...

    def capture(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        spec: CaptureSpec,
        folder: Path,
    ) -> None:
        """Run the sequences as :meth:`force` does and write what ``spec`` selects, caches included, to ``folder``."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


Opener = Callable[[str, Mapping[str, Any]], Subject]
"""``open(model, options)``; raises ``ConfigError`` on an option it does not know, ``SubjectError`` if it cannot."""
