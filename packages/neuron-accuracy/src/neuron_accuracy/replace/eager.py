# SPDX-License-Identifier: Apache-2.0
"""A model of transformers whose modules' outputs come from a capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

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

    def info(self) -> SubjectInfo:
        """Who it is."""
        return self.subject.info()

    def candidates(self, reference: Path, patterns: Sequence[str]) -> Sequence[str]:
        """Modules of the model whose first output the capture has, in the order the capture says they run."""
        source, spec = self._source(reference), CaptureSpec(tuple(patterns))
        known = dict(self.subject.model.named_modules())
        names = (name for name in source.capture.modules() if name in known and spec.wants_module(name))
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
            sequence = (*prompt, *tokens[:-1])
            self.subject.during = lambda sequence=sequence: self._replacing(source, chosen, sequence)
            try:
                scores += self.subject.force([prompt], [tokens], 0)
            finally:
                self.subject.during = None
        return scores

    def _source(self, reference: Path) -> ReferenceRows:
        if reference not in self._sources:
            self._sources[reference] = ReferenceRows(reference)
        return self._sources[reference]

    @contextmanager
    def _replacing(
        self, source: ReferenceRows, chosen: Sequence[str], tokens: Sequence[int]
    ) -> Iterator[None]:
        modules = dict(self.subject.model.named_modules())
        handles = []
        for name in chosen:
            handles.append(modules[name].register_forward_hook(_hook(source, name, tokens)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _hook(source: ReferenceRows, name: str, tokens: Sequence[int]) -> Any:
    def replace(_: Any, args: Any, result: Any) -> Any:
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        for index, output in enumerate(outputs):
            tensor = f"{name}:output.{index}"
            if isinstance(output, Tensor) and source.knows(tensor):
                outputs[index] = _rows(source, tensor, tokens, output)
        return outputs[0] if isinstance(result, Tensor) else type(result)(outputs)

    return replace


def _rows(source: ReferenceRows, name: str, tokens: Sequence[int], output: Tensor) -> Tensor:
    """``output [1, n, …]``, the last n positions of ``tokens``, with the rows that the capture has."""
    count = output.shape[1]
    replaced = output.clone()
    positions = range(len(tokens) - count, len(tokens))
    for place, row in enumerate(source.rows(name, tokens, positions)):
        if row is not None:
            replaced[0, place] = row.to(output.dtype).view(output.shape[2:])
    return replaced
