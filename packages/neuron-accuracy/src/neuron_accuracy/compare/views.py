# SPDX-License-Identifier: Apache-2.0
"""The tensors of a capture under the names they are compared by, and rows of the whole tensor they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from neuron_accuracy.capture.reader import Capture, Stored
from neuron_accuracy.capture.records import StepRecord
from neuron_accuracy.compare.whole import assemble, differing_replicas, differs, slice_bounds
from neuron_accuracy.errors import CaptureError, LayoutError
from neuron_accuracy.layout import Rows, Sharding, TensorLayout

__all__ = ["View", "ViewReader", "views_of"]

SMALL_ELEMENTS = 1 << 19
"""What all ranks hold of one step's tensor is read at once up to so many elements, and by rows beyond."""

T = TypeVar("T")


@dataclass(frozen=True)
class View:
    """A tensor, or a slice of a fused one, by the name it is compared under."""

    name: str
    """``module:tensor``, as other runs call it."""
    module: str
    tensor: str
    layout: TensorLayout
    dtype: torch.dtype
    """What its ranks hold it in: a sum of what they hold is wider."""
    part: str | None = None
    """The slice."""

    @property
    def source(self) -> str:
        """What its own run calls it."""
        return f"{self.module}:{self.tensor}" + (f":{self.part}" if self.part else "")

    @property
    def heads(self) -> int | None:
        """Heads in its last dimension: of a slice, its share of the whole's."""
        heads = self.layout.heads
        if heads is None or self.part is None:
            return heads
        sizes = {item.name: item.size for item in self.layout.slices}
        share, rest = divmod(sizes[self.part] * heads, sum(sizes.values()))
        return None if rest else share


def views_of(capture: Capture) -> dict[str, View]:
    """All tensors of a capture by the name they are compared under, in the order they were computed. A fused tensor is
    there whole and by its slices. Raises ``CaptureError`` if two have one name, ``LayoutError`` if the rows of one are
    declared to be others in another phase.
    """
    views: dict[str, View] = {}
    names = capture.run.names
    for module in capture.modules():
        dp, step = capture.first_step(module)
        rank = capture.ranks(module, step, dp)[0]
        held = capture.tensors(module, step, rank, dp)
        for tensor in sorted(held, key=_inputs_first):
            own = f"{module}:{tensor}"
            layout = _declared(capture, module, tensor, step.phase)
            for part in (None, *(item.name for item in layout.slices)):
                source = own if part is None else f"{own}:{part}"
                view = View(names.get(source, source), module, tensor, layout, held[tensor].dtype, part)
                if view.name in views:
                    raise CaptureError(
                        f"{capture.folder}: {views[view.name].source} and {source} are both called {view.name}; "
                        "give one of them another name"
                    )
                views[view.name] = view
    return views


class ViewReader:
    """Reads rows of one view's whole tensor, from whatever the ranks hold. A complex number is two features, its real
    part and its imaginary one.
    """

    def __init__(self, capture: Capture, view: View) -> None:
        self.capture = capture
        self.view = view
        self._checked: set[tuple[int, int]] = set()
        self._held: tuple[tuple[int, int], list[Tensor], Tensor] | None = None

    def holds(self, dp: int, step: StepRecord) -> bool:
        """Whether the step has the tensor."""
        if self.view.module not in self.capture.modules_of(step, dp):
            return False
        ranks = self.capture.ranks(self.view.module, step, dp)
        return bool(ranks) and self.view.tensor in self.capture.tensors(self.view.module, step, ranks[0], dp)

    def dtype(self, dp: int, step: StepRecord) -> torch.dtype:
        """What the ranks hold it in."""
        return self._stored(dp, step)[0][1].dtype

    def shape(self, dp: int, step: StepRecord) -> tuple[int, ...]:
        """Of the whole tensor, slices not taken; its rows are checked against the step's."""
        layout, parts = self._layout(step), [stored for _, stored in self._stored(dp, step)]
        empty = [torch.empty(stored.shape, dtype=stored.dtype, device="meta") for stored in parts]
        shape = tuple(self._named(lambda: assemble(empty, layout)).shape)
        expected = {Rows.TOKENS: step.num_tokens, Rows.REQUESTS: step.num_seqs}.get(layout.rows)
        if expected is not None and (not shape or shape[0] != expected):
            raise LayoutError(
                f"{self.capture.folder}: {self.view.source} in step {step.number} is {list(shape)}, but the step has "
                f"{expected} rows of {layout.rows}; declare its layout with the rows it has"
            )
        return shape

    def rows(self, dp: int, step: StepRecord, begin: int, end: int) -> Tensor:
        """Rows ``begin`` to ``end`` of the whole, ``[rows, features]``, in their dtype, or in that of their parts."""
        if self._is_small(dp, step):
            return self._features(self._small(dp, step)[1][begin:end])
        layout = self._layout(step)
        stored = self._stored(dp, step)
        dealt = layout.sharding in (Sharding.SHARDED, Sharding.INTERLEAVED) and len(stored) > 1
        if dealt and layout.dim % len(stored[0][1].shape) == 0:
            return self._features(self._dealt_rows(dp, step, begin, end, stored))
        parts = [self._load(dp, step, rank, begin, end) for rank, _ in self._needed(stored, step)]
        return self._features(self._named(lambda: assemble(parts, layout)))

    def everything(self, dp: int, step: StepRecord) -> Tensor:
        """The whole of a tensor that has no rows, as one row."""
        stored = self._needed(self._stored(dp, step), step)
        parts = [
            self.capture.load(self.view.module, self.view.tensor, step, rank, dp=dp) for rank, _ in stored
        ]
        return _real(self._named(lambda: assemble(parts, self._layout(step)))).reshape(1, -1)

    def check(self, dp: int, step: StepRecord, chunk: int) -> list[str]:
        """Check the digests of a step's parts once, and that replicas agree; says which do not."""
        if (dp, step.number) in self._checked:
            return []
        self._checked.add((dp, step.number))
        stored = self._stored(dp, step)
        if self._is_small(dp, step):
            found = self._named(lambda: differing_replicas(self._small(dp, step)[0], self._layout(step)))
            return [_differ(step, stored, found[0], 0)] if found else []
        for rank, _ in stored:
            self.capture.check(self.view.module, self.view.tensor, step, rank, dp=dp)
        return self._differing(dp, step, stored, chunk)

    def _differing(
        self, dp: int, step: StepRecord, stored: list[tuple[int, Stored]], chunk: int
    ) -> list[str]:
        replicated = self._layout(step).sharding is Sharding.REPLICATED or any(
            item.replicas > 1 for item in self._layout(step).slices
        )
        if len(stored) == 1 or not replicated or not stored[0][1].shape:
            return []
        for begin in range(0, stored[0][1].shape[0], chunk):
            end = min(begin + chunk, stored[0][1].shape[0])
            parts = [self._load(dp, step, rank, begin, end) for rank, _ in stored]
            found = self._named(lambda: differing_replicas(parts, self._layout(step)))  # noqa: B023
            if found:
                return [_differ(step, stored, found[0], begin)]
        return []

    def _is_small(self, dp: int, step: StepRecord) -> bool:
        return sum(stored.elements for _, stored in self._stored(dp, step)) <= SMALL_ELEMENTS

    def _small(self, dp: int, step: StepRecord) -> tuple[list[Tensor], Tensor]:
        """What all ranks hold of a step, digests checked, and the whole; kept until another step is asked for."""
        key = (dp, step.number)
        if self._held is None or self._held[0] != key:
            view = self.view
            ranks = [rank for rank, _ in self._stored(dp, step)]
            parts = [self.capture.load(view.module, view.tensor, step, rank, dp=dp) for rank in ranks]
            self._held = key, parts, self._named(lambda: assemble(parts, self._layout(step)))
        return self._held[1:]

    def _dealt_rows(
        self, dp: int, step: StepRecord, begin: int, end: int, stored: list[tuple[int, Stored]]
    ) -> Tensor:
        if self._layout(step).sharding is Sharding.SHARDED:
            pieces, first = [], 0
            for rank, held in stored:
                low, high = max(begin - first, 0), min(end - first, held.shape[0])
                if low < high:
                    pieces.append(self._load(dp, step, rank, low, high))
                first += held.shape[0]
            return torch.cat(pieces)
        ranks = len(stored)
        whole: Tensor | None = None
        for index, (rank, _) in enumerate(stored):
            low, high = -(-(begin - index) // ranks), -(-(end - index) // ranks)
            part = self._load(dp, step, rank, low, high)
            if whole is None:
                whole = part.new_empty((end - begin, *part.shape[1:]))
            at = low * ranks + index - begin
            whole[at::ranks] = part
        assert whole is not None
        return whole

    def _needed(self, stored: list[tuple[int, Stored]], step: StepRecord) -> list[tuple[int, Stored]]:
        return stored[:1] if self._layout(step).sharding is Sharding.REPLICATED else stored

    def _stored(self, dp: int, step: StepRecord) -> list[tuple[int, Stored]]:
        capture, view = self.capture, self.view
        ranks = capture.ranks(view.module, step, dp)
        layout = self._layout(step)
        if layout.sharding is not Sharding.REPLICATED and len(ranks) != capture.run.ranks:
            lost = sorted(set(range(capture.run.ranks)) - set(ranks))
            raise CaptureError(
                f"{capture.folder}: ranks {lost} hold nothing of {view.source} in step {step.number}, but it is "
                f"{layout.sharding} over {capture.run.ranks}; capture all ranks"
            )
        held = [(rank, capture.tensors(view.module, step, rank, dp).get(view.tensor)) for rank in ranks]
        return [(rank, self._present(stored, step, rank)) for rank, stored in held]

    def _present(self, stored: Stored | None, step: StepRecord, rank: int) -> Stored:
        if stored is None:
            raise CaptureError(
                f"{self.capture.folder}: rank {rank} holds no {self.view.source} in step {step.number}, other ranks do"
            )
        return stored

    def _load(self, dp: int, step: StepRecord, rank: int, begin: int, end: int) -> Tensor:
        return self.capture.load(self.view.module, self.view.tensor, step, rank, dp=dp, rows=(begin, end))

    def _layout(self, step: StepRecord) -> TensorLayout:
        """Of the tensor in this step: phases may differ."""
        return self.capture.run.layout(self.view.module, self.view.tensor, step.phase)

    def _features(self, whole: Tensor) -> Tensor:
        if self.view.part is not None:
            begin, end = slice_bounds(self.view.layout.slices)[self.view.part]
            whole = whole[..., begin:end]
        return _real(whole).reshape(whole.shape[0], -1)

    def _named(self, make: Callable[[], T]) -> T:
        try:
            return make()
        except LayoutError as error:
            raise LayoutError(f"{self.capture.folder}: {self.view.source}: {error}") from error


def _differ(
    step: StepRecord, stored: list[tuple[int, Stored]], found: tuple[int, int, Tensor, Tensor], begin: int
) -> str:
    rank, first, part, reference = found
    rows = differs(part, reference).reshape(part.shape[0] if part.dim() else 1, -1).any(1).nonzero()
    return (
        f"in step {step.number} ranks {stored[first][0]} and {stored[rank][0]} should hold the same of it, but differ "
        f"from row {begin + int(rows[0])} on"
    )


def _declared(capture: Capture, module: str, tensor: str, phase: str) -> TensorLayout:
    """What is declared for all phases, else for this one; another phase may split it over ranks in another way."""
    own, run = f"{module}:{tensor}", capture.run
    layout = run.layouts[own] if own in run.layouts else run.layout(module, tensor, phase)
    if any(name.startswith(f"{own}@") for name in run.layouts):
        steps = [(dp, step) for dp in capture.replicas for step in capture.steps(dp)]
        phases = sorted({step.phase for dp, step in steps if module in capture.modules_of(step, dp)})
        rows = {name: run.layout(module, tensor, name).rows for name in phases}
        if len(set(rows.values())) > 1:
            said = ", ".join(f"{kind} in {name}" for name, kind in rows.items())
            raise LayoutError(
                f"{capture.folder}: the rows of {own} are declared to be {said}; declare a layout with the same rows "
                f"for each phase, or one as {own} for all"
            )
        return replace(layout, rows=rows[phase])
    return layout


def _real(whole: Tensor) -> Tensor:
    return torch.view_as_real(whole) if whole.dtype.is_complex else whole


def _inputs_first(tensor: str) -> tuple[bool, str]:
    return not tensor.startswith("input."), tensor
