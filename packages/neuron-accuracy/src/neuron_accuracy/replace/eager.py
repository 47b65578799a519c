# SPDX-License-Identifier: Apache-2.0
"""A model of transformers whose modules' outputs come from a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from neuron_accuracy.capture.order import merge_order
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.errors import SubjectError
from neuron_accuracy.replace.source import ReferenceRows
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.protocol import Scores
from neuron_accuracy.subjects.transformers import TransformersSubject
from neuron_core.errors import unknown_name_hint

__all__ = ["ReplaceableTransformers"]


class ReplaceableTransformers:
    """A `Replaceable` over a subject of transformers."""

    def __init__(self, subject: TransformersSubject) -> None:
        self.subject = subject
        self._sources: dict[Path, ReferenceRows] = {}
        self._ran: dict[Path, tuple[str, ...]] = {}

    def info(self) -> SubjectInfo:
        """Who it is."""
        return self.subject.info()

    def candidates(self, reference: Path, patterns: Sequence[str]) -> Sequence[str]:
        """Modules of the model whose first output the capture has and is rows of tokens, in the order of their last
        calls: what is replaced is replaced in every call, and must hide no fault of a module that ran before the last.
        """
        source, spec = self._source(reference), CaptureSpec(tuple(patterns))
        if reference not in self._ran:
            self._ran[reference] = self._order(source)
        names = (name for name in self._ran[reference] if spec.wants_module(name))
        return [name for name in names if source.knows(f"{name}:output.0")]

    def force_replaced(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        reference: Path,
        patterns: Sequence[str],
        chosen: Sequence[str],
    ) -> list[Scores]:
        """See `Replaceable`; raises ``SubjectError`` for a module that is no candidate."""
        known = set(self.candidates(reference, patterns))
        for name in chosen:
            if name not in known:
                raise SubjectError(f"{name} cannot be replaced: {unknown_name_hint(name, known)}")
        source = self._source(reference)
        scores = []
        for prompt, tokens in zip(prompts, continuations, strict=True):
            fed = _Fed((*prompt, *tokens[:-1]), len(tokens))
            scores += self._force(prompt, tokens, chosen, partial(_replacer, source, fed))
        return scores

    def _order(self, source: ReferenceRows) -> tuple[str, ...]:
        """Modules in the order of their last calls over the capture's requests, of those that give rows of tokens."""
        modules = [name for name, _ in self.subject.model.named_modules() if name]
        runs = []
        for tokens in source.sequences():
            ended: dict[str, None] = {}
            self._force(tokens, tokens[-1:], modules, partial(_listener, ended, _Fed(tokens, 1)))
            runs.append(list(ended))
        return merge_order(runs)

    def _force(
        self, prompt: Sequence[int], tokens: Sequence[int], names: Sequence[str], hook: Callable[[str], Any]
    ) -> list[Scores]:
        self.subject.during = lambda: self._hooked(names, hook)
        try:
            return self.subject.force([prompt], [tokens], 0)
        finally:
            self.subject.during = None

    def _source(self, reference: Path) -> ReferenceRows:
        if reference not in self._sources:
            self._sources[reference] = ReferenceRows(reference)
        return self._sources[reference]

    @contextmanager
    def _hooked(self, names: Sequence[str], hook: Callable[[str], Any]) -> Iterator[None]:
        """One pass with a hook of its own on each module."""
        modules = dict(self.subject.model.named_modules())
        handles = [modules[name].register_forward_hook(hook(name)) for name in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True)
class _Fed:
    """The tokens of one pass, and of how many of the last the logits are made."""

    tokens: Sequence[int]
    kept: int

    def rows_of(self, output: Tensor) -> Tensor | None:
        """The view ``[m, …]`` of ``[1, m, …]`` or ``[m, …]`` that is the rows of the last m tokens; None if none is.

        A router and its experts have the second: tokens without the batch.
        """
        if output.dim() >= 2 and output.shape[0] == 1 and output.shape[1] in (len(self.tokens), self.kept):
            return output[0]
        return output if output.dim() and output.shape[0] == len(self.tokens) else None


def _listener(ended: dict[str, None], fed: _Fed, name: str) -> Any:
    def listen(_: Any, args: Any, result: Any) -> None:
        first = result[0] if isinstance(result, tuple | list) and result else result
        ended.pop(name, None)
        if isinstance(first, Tensor) and fed.rows_of(first) is not None:
            ended[name] = None

    return listen


def _replacer(source: ReferenceRows, fed: _Fed, name: str) -> Any:
    calls = count()

    def replace(_: Any, args: Any, result: Any) -> Any:
        # The names that a capture gives: of the second call of a pass output.0@1, …
        call = next(calls)
        again = f"@{call}" if call else ""

        def put_into(tensor: str, value: Any) -> Any:
            if isinstance(value, Tensor):
                return _with_rows(source, f"{name}:{tensor}{again}", fed, value)
            if isinstance(value, tuple | list):
                items = [put_into(f"{tensor}.{index}", item) for index, item in enumerate(value)]
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            return value

        return put_into("output.0" if isinstance(result, Tensor) else "output", result)

    return replace


def _with_rows(source: ReferenceRows, name: str, fed: _Fed, output: Tensor) -> Tensor:
    """``output`` with the rows that the capture has; itself if it has none of this call, or these are no rows."""
    replaced = output.clone()
    places = fed.rows_of(replaced)
    if places is None or not source.knows(name):
        return output
    positions = range(len(fed.tokens) - len(places), len(fed.tokens))
    for place, row in zip(places, source.rows(name, fed.tokens, positions), strict=True):
        if row is None:
            continue
        if row.numel() != place.numel():
            raise SubjectError(
                f"{name} has {place.numel()} numbers a token, and {row.numel()} in {source.capture.folder}: "
                "that is a capture of another model"
            )
        place.copy_(row.view(place.shape))
    return replaced
