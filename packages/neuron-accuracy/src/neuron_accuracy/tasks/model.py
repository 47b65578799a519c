# SPDX-License-Identifier: Apache-2.0
"""A subject as a model of lm-eval. Imports lm-eval: only ``evaluate`` imports this."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from neuron_accuracy.errors import AccuracyError, SubjectError
from neuron_accuracy.subjects.protocol import Sampling, Subject

__all__ = ["SubjectLM"]

_BATCH = 16
_CHUNK_TOKENS = 8
"""Tokens drawn at a time, before it is looked whether an answer has ended."""
_DEFAULT_TOKENS = 256
_MAX_LENGTH = 2048


class SubjectLM(TemplateLM):
    """Answers what lm-eval asks through :meth:`Subject.force` and :meth:`Subject.generate`.

    A rolling likelihood is cut into windows of ``max_length`` tokens. ``progress`` is called with the number of
    requests answered so far.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        max_length: int = _MAX_LENGTH,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        self._subject = subject
        self._max_length = max_length
        self._progress = progress
        self._done = 0

    @property
    def tokenizer_name(self) -> str:
        """The subject's name, in the keys of lm-eval's caches."""
        return self._subject.info().model.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """What stands before a text that has nothing before it: the first special token of a prompt, or end of text."""
        tokenizer = getattr(self._subject, "tokenizer", None)
        before = self._subject.encode("")
        known = before[0] if before else getattr(tokenizer, "eos_token_id", None)
        if known is None:
            raise SubjectError(
                f"{self._subject.info().model}: no token stands before an empty context; a model with a "
                "beginning or end of text in its tokenizer works"
            )
        return int(known)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; special tokens as a prompt has them unless told not to."""
        ids = self._subject.encode(string)
        special = self._subject.encode("")
        if add_special_tokens is False and special and ids[: len(special)] == special:
            return ids[len(special) :]
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation by the tokenizer's template; ``SubjectError`` without one."""
        tokenizer = getattr(self._subject, "tokenizer", None)
        if tokenizer is None or not tokenizer.chat_template:
            raise SubjectError(f"{self._subject.info().model} has no chat template")
        text: str = tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template."""
        return getattr(getattr(self._subject, "tokenizer", None), "chat_template", None)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of ``max_length`` tokens."""
        totals: list[float] = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.eot_token_id, self._max_length, 1
            )
            pairs = [make_disjoint_window(window) for window in windows]
            scored = self._scored([(list(context), list(tokens)) for context, tokens in pairs])
            totals.append(sum(value for value, _ in scored))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each ended before the first of its ``until`` texts, or by the end of text."""
        answers: list[str] = []
        for begin in range(0, len(requests), _BATCH):
            part = [request.args for request in requests[begin : begin + _BATCH]]
            answers += self._generated(part)
            self._tell(len(part))
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scored: list[tuple[float, bool]] = []
        for begin in range(0, len(requests), _BATCH):
            part = [(context, tokens) for _, context, tokens in requests[begin : begin + _BATCH]]
            scored += self._scored(part)
            self._tell(len(part))
        return scored

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        contexts, tokens = [context for context, _ in pairs], [tokens for _, tokens in pairs]
        scored: list[tuple[float, bool]] = []
        for ids, scores in zip(tokens, self._subject.force(contexts, tokens, 1), strict=True):
            value = float(scores.chosen_logprobs.double().sum())
            if math.isnan(value):
                raise AccuracyError(
                    f"{self._subject.info().model}: the log-probability of a given token is not a number, or not told"
                )
            scored.append((value, scores.top_ids[:, 0].tolist() == list(ids)))
        return scored

    def _generated(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        prompts = [self.tok_encode(text) for text, _ in requests]
        wishes = [_Wish.of(given) for _, given in requests]
        drawn: list[list[int]] = [[] for _ in requests]
        texts = [""] * len(requests)
        going = list(range(len(requests)))
        while going:
            made = self._subject.generate(
                [prompts[at] + drawn[at] for at in going],
                _CHUNK_TOKENS,
                [wishes[at].sampling for at in going],
                1,
            )
            for at, item in zip(going, made, strict=True):
                kept = self._until_end(item.tokens)
                drawn[at] = (drawn[at] + kept)[: wishes[at].most]
                texts[at], cut = wishes[at].cut(self._subject.decode(drawn[at]))
                full = len(drawn[at]) >= wishes[at].most
                wishes[at].ended = cut or full or len(kept) < len(item.tokens)
            going = [at for at in going if not wishes[at].ended]
        return texts

    def _until_end(self, tokens: Sequence[int]) -> list[int]:
        end = getattr(getattr(self._subject, "tokenizer", None), "eos_token_id", None)
        drawn = list(tokens)
        return drawn[: drawn.index(end)] if end is not None and end in drawn else drawn

    def _tell(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done)


class _Wish:
    """How one answer is to be drawn and where it ends."""

    def __init__(self, sampling: Sampling, until: Sequence[str], most: int) -> None:
        self.sampling = sampling
        self.until = until
        self.most = most
        self.ended = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Wish:
        left = dict(given)
        until = left.pop("until", None) or []
        most = int(left.pop("max_gen_toks", left.pop("max_tokens", _DEFAULT_TOKENS)))
        draws = bool(left.pop("do_sample", False))
        limits = {name: left.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in left}
        if left:
            raise AccuracyError(f"a task asks for {left}, which no subject knows")
        sampling = Sampling(**{"temperature": 1.0, **limits}) if draws else Sampling()
        return cls(sampling, [until] if isinstance(until, str) else until, most)

    def cut(self, text: str) -> tuple[str, bool]:
        """The text before the first end, and whether there is one."""
        places = [text.find(end) for end in self.until if end and end in text]
        return (text[: min(places)], True) if places else (text, False)
