# SPDX-License-Identifier: Apache-2.0
"""``vllm-neuron:MODEL`` as a subject of neuron-accuracy: an offline engine with the settings of ``vllm serve``."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.errors import CaptureError, SubjectError
from neuron_accuracy.replace.source import ReferenceRows
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.protocol import Generation, Sampling, Scores
from neuron_accuracy.subjects.scores import scores_of
from neuron_accuracy.subjects.secrets import public_value
from neuron_core.errors import ConfigError, unknown_name_hint
from vllm_neuron.accuracy.engine import SubjectEngine
from vllm_neuron.accuracy.forcing import FORCED
from vllm_neuron.accuracy.identity import subject_info
from vllm_neuron.accuracy.refusals import request_refusals, start_refusals

__all__ = ["EngineSubject", "open_engine"]

HEAD = "lm_head"
"""The module whose output is a row of logits per request."""

LOGITS = CaptureSpec((HEAD,))


def open_engine(model: str, options: Mapping[str, Any]) -> EngineSubject:
    """An engine over ``model``; ``options`` are fields of vLLM's `EngineArgs`, as JSON where they are text.

    Raises ``ConfigError`` for a field that does not exist. No engine is started yet.
    """
    known = {item.name for item in dataclasses.fields(EngineArgs)}
    for name, value in options.items():
        if name not in known:
            hint = f"unknown option; {unknown_name_hint(name, known)}"
            raise ConfigError(f"vllm-neuron.{name}", public_value(name, value), hint)
    return EngineSubject(model, {name: _value(value) for name, value in options.items()})


class EngineSubject:
    """One engine at a time: tokens are drawn by an engine like any other, and forced in one with a processor for it."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="neuron-accuracy-")
        self._engines = SubjectEngine(model, options)
        self._count = 0
        self._info: SubjectInfo | None = None

    def info(self) -> SubjectInfo:
        """Who it is; vLLM's configuration is resolved, no engine started."""
        if self._info is None:
            config = self._engines.config()
            with start_refusals(self._engines.model):
                self._info = subject_info(config)
        return self._info

    @property
    def max_length(self) -> int:
        """The most tokens a sequence may have, prompt and continuation."""
        return int(self._engines.config().model_config.max_model_len)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens as a prompt has them."""
        return list(self._tokenizer().encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._tokenizer().decode(list(tokens)))

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, sampling: Sequence[Sampling], top: int
    ) -> list[Generation]:
        """Exactly ``num_tokens`` tokens after each prompt, drawn as a server draws them, all prompts at once.

        Tokens at temperature 0 come from a run without scores, whose graph takes the likeliest alone.
        """
        folder = self._folder()
        llm = self._engines.plain({"tensor_capture": {"folder": str(self._folder()), **LOGITS.to_json()}})
        greedy = [index for index, how in enumerate(sampling) if how.temperature == 0]
        alone = _draw(
            llm, [prompts[index] for index in greedy], [sampling[index] for index in greedy], num_tokens, None
        )
        llm.collective_rpc("begin_capture", args=(str(folder),))
        outputs = _draw(llm, prompts, sampling, num_tokens, top or 1)
        _end(llm)
        drawn = [tuple(output.outputs[0].token_ids) for output in outputs]
        if top == 0:
            scores = _captured_scores(folder, prompts, drawn, 0)
        else:
            scores = [_top_scores(output, top) for output in outputs]
        for index, output in zip(greedy, alone, strict=True):
            tokens = tuple(output.outputs[0].token_ids)
            if tokens != drawn[index]:  # the scores must be those of the tokens that a client gets
                drawn[index] = tokens
                scores[index] = self.force([prompts[index]], [tokens], top)[0]
        return [
            Generation(tuple(prompt), tokens, score)
            for prompt, tokens, score in zip(prompts, drawn, scores, strict=True)
        ]

    def force(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], top: int
    ) -> list[Scores]:
        """Scores of given continuations: prefill of the prompt, then a decode step for each token."""
        folder = self._folder()
        self.capture(prompts, continuations, LOGITS, folder)
        return _captured_scores(folder, prompts, continuations, top)

    def capture(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        spec: CaptureSpec,
        folder: Path,
    ) -> None:
        """Run the sequences as :meth:`force` does and write what ``spec`` selects, caches included, to ``folder``.

        A prompt that was given before waits until that one has ended, so that it meets what it left in the cache.
        """
        settings = {"tensor_capture": {"folder": str(folder), **spec.to_json()}}
        llm = self._engines.forcing(settings)
        _run(llm, prompts, continuations)
        _end(llm)
        self._engines.close()

    def candidates(self, reference: Path, patterns: Sequence[str]) -> Sequence[str]:
        """Names of the modules that can be replaced from the capture ``reference``, in the order they run."""
        found: list[str] = self._replacing(reference, patterns).collective_rpc("replaceable_modules")[0]
        return found

    def force_replaced(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        reference: Path,
        patterns: Sequence[str],
        chosen: Sequence[str],
    ) -> list[Scores]:
        """Whole rows as :meth:`force` gives them, with outputs of ``chosen`` modules from the capture ``reference``.

        ``patterns`` say which can be chosen; another choice of them needs no other start.
        """
        llm, folder = self._replacing(reference, patterns), self._folder()
        llm.collective_rpc("begin_capture", args=(str(folder),))
        llm.collective_rpc("replace_modules", args=(list(chosen),))
        _run(llm, prompts, continuations)
        _end(llm)
        return _captured_scores(folder, prompts, continuations, 0)

    def _replacing(self, reference: Path, patterns: Sequence[str]) -> Any:
        settings = {
            "tensor_replacement": {"folder": str(reference), "modules": list(patterns)},
            "tensor_capture": {"folder": str(self._folder()), **LOGITS.to_json()},
        }
        # What one choice left in the cache is nothing for the next.
        return self._engines.forcing(settings, key=(str(reference), *patterns), enable_prefix_caching=False)

    def close(self) -> None:
        """End the engine and remove what was written for this subject."""
        self._engines.close()
        with suppress(OSError):
            self._scratch.cleanup()

    def _folder(self) -> Path:
        self._count += 1
        return Path(self._scratch.name) / f"{self._count}"

    def _tokenizer(self) -> Any:
        tokenizer = self._engines.tokenizer()
        if tokenizer is None:
            raise SubjectError(f"{self._engines.model} has no tokenizer: give prompts as token ids")
        return tokenizer


def _end(llm: Any) -> None:
    """End a capture; raises ``CaptureError`` if it had ended before it was whole."""
    for problem in llm.collective_rpc("end_observation"):
        if problem is not None:
            raise CaptureError(problem)


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _prompts(prompts: Sequence[Sequence[int]]) -> list[Any]:
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def _draw(
    llm: Any, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling], num_tokens: int, top: int | None
) -> list[Any]:
    if not prompts:
        return []
    with request_refusals():
        params = [_params(how, num_tokens, top) for how in sampling]
        outputs: list[Any] = llm.generate(_prompts(prompts), params, use_tqdm=False)
    return outputs


def _params(how: Sampling, num_tokens: int, top: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        min_p=how.min_p,
        seed=how.seed,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=top,
        detokenize=False,
    )


def _run(llm: Any, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> None:
    waiting = list(zip(prompts, continuations, strict=True))
    while waiting:
        wave: list[tuple[Sequence[int], Sequence[int]]] = []
        later: list[tuple[Sequence[int], Sequence[int]]] = []
        seen: set[tuple[int, ...]] = set()
        for prompt, tokens in waiting:
            (later if tuple(prompt) in seen else wave).append((prompt, tokens))
            seen.add(tuple(prompt))
        with request_refusals():
            params = [_forced(tokens) for _, tokens in wave]
            llm.generate(_prompts([prompt for prompt, _ in wave]), params, use_tqdm=False)
        waiting = later


def _forced(tokens: Sequence[int]) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(tokens),
        ignore_eos=True,
        detokenize=False,
        extra_args={FORCED: list(tokens)},
    )


def _captured_scores(
    folder: Path, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], top: int
) -> list[Scores]:
    """Of each sequence those of a request of its own, also where another has the same tokens."""
    source = ReferenceRows(folder)
    scores: list[Scores] = []
    taken: set[str] = set()
    for prompt, tokens in zip(prompts, continuations, strict=True):
        whole = [*prompt, *tokens]
        request = source.request_of(whole[:-1], taken)
        if request is None:
            raise SubjectError(
                f"no request of the run computed a prompt of {len(prompt)} tokens and its {len(tokens)} for the "
                f"sequence at place {len(scores)}"
            )
        taken.add(request)
        rows = source.rows(f"{HEAD}:output.0", whole, range(len(prompt) - 1, len(whole) - 1), request)
        if missing := [place for place, row in enumerate(rows) if row is None]:
            raise SubjectError(f"no logits of token {missing[0]} after a prompt of {len(prompt)} tokens")
        scores.append(
            scores_of(torch.stack([row for row in rows if row is not None]), tokens, len(prompt), top)
        )
    return scores


def _top_scores(output: Any, top: int) -> Scores:
    drawn = output.outputs[0]
    ids, values, chosen = [], [], []
    for token, row in zip(drawn.token_ids, drawn.logprobs, strict=True):
        ranked = sorted(row.items(), key=lambda item: item[1].rank)[:top]
        ids.append([index for index, _ in ranked])
        values.append([item.logprob for _, item in ranked])
        chosen.append(row[token].logprob)
    begin = len(output.prompt_token_ids)
    return Scores(begin, torch.tensor(chosen), torch.tensor(ids), torch.tensor(values))
