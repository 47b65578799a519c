# SPDX-License-Identifier: Apache-2.0
"""A causal language model of transformers, one sequence at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.errors import SubjectError
from neuron_accuracy.subjects.digest import model_digest, state_digest, vocabulary_digest
from neuron_accuracy.subjects.drawing import draw, generator_of
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.options import read_options
from neuron_accuracy.subjects.protocol import Generation, Sampling, Scores
from neuron_accuracy.subjects.scores import concatenated, scores_of
from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["ABILITIES", "TransformersSubject", "open_transformers"]

ABILITIES = frozenset({"logits", "generate", "capture", "kv", "replace"})
CACHES = ("auto", "float8_e4m3fn", "float8_e5m2")
DTYPES = ("float32", "bfloat16", "float16", "float64")
_DEFAULTS = {"dtype": "float32", "cache_dtype": "auto", "attention": "sdpa", "device": "cpu"}


def open_transformers(model: str, options: Mapping[str, Any]) -> TransformersSubject:
    """A folder, or a name that is in the hub's cache; options ``dtype``, ``cache_dtype``, ``attention``, ``device``.

    Nothing is downloaded. Raises ``SubjectError`` if there is no such model, ``ConfigError`` on a wrong option.
    """
    given = read_options("transformers", options, _DEFAULTS)
    if given["dtype"] not in DTYPES:
        raise ConfigError(
            "transformers.dtype",
            given["dtype"],
            f"no such dtype; {unknown_name_hint(given['dtype'], DTYPES)}",
        )
    if given["cache_dtype"] not in CACHES:
        hint = f"no such dtype of a cache; {unknown_name_hint(given['cache_dtype'], CACHES)}"
        raise ConfigError("transformers.cache_dtype", given["cache_dtype"], hint)
    folder = _folder(model)
    tokenizer = _tokenizer(folder)
    info = SubjectInfo(
        kind="transformers",
        model=model,
        revision=model_digest(folder),
        dtype=given["dtype"],
        vocab_size=_vocab_size(folder),
        tokenizer=vocabulary_digest(tokenizer),
        abilities=ABILITIES,
        cache_dtype=given["cache_dtype"],
    )
    return TransformersSubject(lambda: _load(folder, given), tokenizer, info)


class TransformersSubject:
    """A model, loaded when it first runs, and its tokenizer, if there is one.

    ``during`` may be set to a callable that makes a context manager; every forward pass runs in one, which is how
    replacements of a module's outputs are put in. The hooks of a capture see what it leaves.
    """

    def __init__(self, load: Callable[[], Any], tokenizer: Any, info: SubjectInfo) -> None:
        self.tokenizer = tokenizer
        self.during: Callable[[], AbstractContextManager[Any]] | None = None
        self._load: Callable[[], Any] | None = load
        self._info = info
        self._prefill: tuple[tuple[int, ...], torch.Tensor, Any] | None = None

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None, *, name: str = "") -> TransformersSubject:
        """A subject over a model in memory; its revision is a digest of its state as it is now."""
        info = SubjectInfo(
            kind="transformers",
            model=name or type(model).__name__,
            revision=state_digest(model.state_dict()),
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=int(model.config.get_text_config().vocab_size),
            tokenizer=vocabulary_digest(tokenizer),
            abilities=ABILITIES,
        )
        return cls(lambda: model, tokenizer, info)

    @cached_property
    def model(self) -> Any:
        """The module; raises ``SubjectError`` if it cannot be loaded."""
        if self._load is None:
            raise SubjectError(f"{self._info.model} is closed")
        return self._load().eval()

    def info(self) -> SubjectInfo:
        """Who it is."""
        return self._info

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens as a prompt has them; ``SubjectError`` without a tokenizer."""
        return [int(index) for index in self._needs_tokenizer().encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; ``SubjectError`` without a tokenizer."""
        return str(self._needs_tokenizer().decode(list(tokens)))

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, sampling: Sequence[Sampling], top: int
    ) -> list[Generation]:
        """Exactly ``num_tokens`` tokens after each prompt, with a KV cache, one prompt after the other.

        Raises ``SubjectError`` on an empty prompt or an id outside the vocabulary, and if counts do not agree.
        """
        if len(sampling) != len(prompts):
            raise SubjectError(f"{len(prompts)} prompts and {len(sampling)} samplings; one each works")
        self._prefill = None
        try:
            return [
                self._generate(self._checked(prompt), num_tokens, how, top)
                for prompt, how in zip(prompts, sampling, strict=True)
            ]
        finally:
            self._prefill = None

    def force(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], top: int
    ) -> list[Scores]:
        """Scores of given continuations, each sequence in one forward pass: causal attention sees no later token."""
        return [
            self._force(self._checked(prompt), self._checked(tokens, "a continuation"), top)
            for prompt, tokens in _pairs(prompts, continuations)
        ]

    def capture(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        spec: CaptureSpec,
        folder: Path,
    ) -> None:
        """Run each sequence in one step of phase ``prefill`` and write what ``spec`` selects.

        Requests are ``request-0``, …. The last token of a continuation is not fed, as in a generation. Raises
        ``CaptureError``.
        """
        from neuron_accuracy.subjects.transformers_capture import capture_sequences

        sequences = [
            (*self._checked(prompt), *tokens[:-1]) for prompt, tokens in _pairs(prompts, continuations)
        ]
        capture_sequences(self.model, self._info, sequences, spec, folder, self._running, self._cache)

    def close(self) -> None:
        """Release the model."""
        self.__dict__.pop("model", None)
        self._load = None
        self._prefill = None

    def _running(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.during is None else self.during()

    def _cache(self) -> Any:
        from transformers import DynamicCache

        from neuron_accuracy.subjects.quantised_cache import CACHE_DTYPES, QuantisedCache

        dtype = self._info.cache_dtype
        return DynamicCache() if dtype == "auto" else QuantisedCache(CACHE_DTYPES[dtype])

    @torch.no_grad()
    def _forward(self, tokens: Sequence[int], cache: Any, keep: int) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=self.model.device)
        with self._running():
            out = self.model(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep)
        logits: torch.Tensor = out.logits
        return logits[0].float().cpu()

    def _force(self, prompt: tuple[int, ...], tokens: tuple[int, ...], top: int) -> Scores:
        cache = None if self._info.cache_dtype == "auto" else self._cache()
        logits = self._forward((*prompt, *tokens[:-1]), cache, len(tokens))
        return scores_of(logits[-len(tokens) :], tokens, len(prompt), top)

    def _generate(self, prompt: tuple[int, ...], num_tokens: int, how: Sampling, top: int) -> Generation:
        if num_tokens < 1:
            raise SubjectError(f"num_tokens={num_tokens}: must be at least 1")
        generator = generator_of(how)
        logits, cache = self._prefilled(prompt, copied=num_tokens > 1)
        tokens: list[int] = []
        parts: list[Scores] = []
        while True:
            tokens.append(draw(logits[-1], how, generator))
            parts.append(scores_of(logits[-1:], tokens[-1:], len(prompt), top))
            if len(tokens) == num_tokens:
                return Generation(prompt, tuple(tokens), concatenated(parts))
            logits = self._forward(tokens[-1:], cache, 1)

    def _prefilled(self, prompt: tuple[int, ...], *, copied: bool) -> tuple[torch.Tensor, Any]:
        """The last row's logits after a prompt and its cache; many draws after one prompt share the pass."""
        if self._prefill is None or self._prefill[0] != prompt:
            cache = self._cache()
            self._prefill = (prompt, self._forward(prompt, cache, 1), cache)
        _, logits, cache = self._prefill
        return logits, copy.deepcopy(cache) if copied else cache

    def _checked(self, tokens: Sequence[int], what: str = "a prompt") -> tuple[int, ...]:
        ids = tuple(int(token) for token in tokens)
        size = self._info.vocab_size
        if not ids:
            raise SubjectError(f"{what} of no tokens; one token works")
        if wrong := [token for token in ids if not 0 <= token < size]:
            raise SubjectError(
                f"{what} has token id {wrong[0]}; the vocabulary of {self._info.model} is {size}"
            )
        return ids

    def _needs_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise SubjectError(f"{self._info.model} has no tokenizer: give prompts as token ids")
        return self.tokenizer


def _pairs(
    prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    if len(prompts) != len(continuations):
        raise SubjectError(f"{len(prompts)} prompts and {len(continuations)} continuations; one each works")
    return list(zip(prompts, continuations, strict=True))


def _load(folder: Path, given: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, given["dtype"]),
            attn_implementation=given["attention"],
            local_files_only=True,
        )
        return model.to(given["device"])
    except (OSError, ValueError, ImportError, RuntimeError, AssertionError) as error:  # torch: no such device
        raise SubjectError(f"transformers:{folder}: {error}") from error


def _vocab_size(folder: Path) -> int:
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        raise SubjectError(f"transformers:{folder}: no configuration of a language model: {error}") from error


def _folder(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise SubjectError(
            f"transformers:{model}: no such folder, and no model of this name in the hub's cache"
        ) from error


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    ):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SubjectError(f"transformers:{folder}: its tokenizer cannot be read: {error}") from error
