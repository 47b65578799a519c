# SPDX-License-Identifier: Apache-2.0
"""View operators as functions of their base, with the operator that writes a new value back into the base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import node_place
from neuron_core.graphs.passes.emitter import Emit, contiguous

__all__ = ["ViewStep", "item_step", "step_of"]

aten = torch.ops.aten

_SAME = (aten.alias.default, aten.detach.default, aten.lift_fresh.default)
_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_SELF_INVERSE = (aten.transpose.int, aten.t.default)
_FLIPS = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
"""Views that flip a bit of the tensor: the operator that computes their elements, which is its own inverse."""
_COMPLEX = {
    aten.view_as_real.default: aten.view_as_complex.default,
    aten.view_as_complex.default: aten.view_as_real.default,
}


@dataclass(frozen=True)
class ViewStep:
    """One view: ``target(source, *rest, **kwargs)`` of ``shape``.

    ``node`` is the view as captured, for error messages.
    """

    node: fx.Node
    target: Any
    rest: tuple[Any, ...]
    shape: tuple[int, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def repeats(self, source: torch.Tensor) -> bool:
        """Whether one element of ``source`` may be several of the view, which leaves no simple inverse."""
        if self.target is aten.unfold.default:
            _, size, step = self.rest
            return bool(step < size) and math.prod(self.shape) > size
        return self.target is aten.expand.default and math.prod(self.shape) > source.numel()

    def forward(self, emit: Emit, source: Any) -> Any:
        """The view of another value of the same base."""
        if self.target in _SAME:
            return source
        if self.target in _RESHAPES:
            # The new value may have other strides than the captured one, so ``view`` could refuse it.
            return emit(aten.reshape.default, source, list(self.shape))
        if self.target in _FLIPS:
            return emit(_FLIPS[self.target], source)
        if self.target is aten.view_as_complex.default or self.target is aten.view.dtype:
            source = contiguous(emit, source)
        return emit(self.target, source, *self.rest, **dict(self.kwargs))

    def write_back(self, emit: Emit, source: fx.Node, value: fx.Node) -> fx.Node:
        """``source`` with the viewed elements replaced by ``value``; ``CompileError`` if there is no way."""
        if 0 in self.shape:
            return source
        if self.target in _SAME:
            return value
        if self.target in _RESHAPES or self.target is aten.expand.default:
            return emit(aten.reshape.default, value, list(source.meta["val"].shape))
        if self.target is aten.permute.default:
            order = [int(dim) % len(self.rest[0]) for dim in self.rest[0]]
            return emit(aten.permute.default, value, [order.index(dim) for dim in range(len(order))])
        if self.target in _SELF_INVERSE:
            return emit(self.target, value, *self.rest)
        if self.target in _FLIPS:
            return emit(_FLIPS[self.target], value)
        if self.target is aten.view.dtype:
            return emit(aten.view.dtype, contiguous(emit, value), source.meta["val"].dtype)
        if self.target in _COMPLEX:
            return emit(_COMPLEX[self.target], contiguous(emit, value))
        if self.target is aten.unfold.default:
            return self._refold(emit, source, value)
        scatter = _SCATTERS.get(self.target)
        if scatter is None:
            raise CompileError(
                f"{node_place(self.node)}: a write through {self.target} cannot be made out of place; "
                "write to the tensor it views"
            )
        return emit(scatter, source, value, *self.rest, **dict(self.kwargs))

    def _refold(self, emit: Emit, source: fx.Node, value: fx.Node) -> fx.Node:
        """The inverse of ``unfold`` into windows that do not overlap: whole blocks at once, then the rest."""
        dim, size, step = self.rest
        length = source.meta["val"].dim()
        if length == 0:
            return emit(aten.reshape.default, value, [])
        dim %= length
        order = [*range(dim + 1), length, *range(dim + 1, length)]
        windows = emit(aten.permute.default, value, order)  # the window's elements beside its number
        shape = list(source.meta["val"].shape)
        num_windows = value.meta["val"].shape[dim]
        whole = min(num_windows, shape[dim] // step)
        if whole:
            blocks = emit(aten.slice.Tensor, source, dim, 0, whole * step)
            blocks = emit(aten.reshape.default, blocks, [*shape[:dim], whole, step, *shape[dim + 1 :]])
            blocks = emit(
                aten.slice_scatter.default,
                blocks,
                emit(aten.slice.Tensor, windows, dim, 0, whole),
                dim + 1,
                0,
                size,
            )
            blocks = emit(aten.reshape.default, blocks, [*shape[:dim], whole * step, *shape[dim + 1 :]])
            source = emit(aten.slice_scatter.default, source, blocks, dim, 0, whole * step)
        for index in range(whole, num_windows):
            window = emit(aten.select.int, windows, dim, index)
            start = index * step
            source = emit(aten.slice_scatter.default, source, window, dim, start, start + size)
        return source


def step_of(node: fx.Node, target: Any = None) -> ViewStep:
    """The step a view node is; ``target`` is its view operator where the node calls another."""
    shape = tuple(node.meta["val"].shape)
    arguments = tuple(node.args[1:]), shape, tuple(node.kwargs.items())
    return ViewStep(node, target if target is not None else node.target, *arguments)


def item_step(node: fx.Node) -> ViewStep:
    """The step an item of ``split``, ``chunk`` or ``unbind`` is: a slice or a select."""
    parent, index = node.args[0], node.args[1]
    assert isinstance(parent, fx.Node) and isinstance(index, int)
    shape = tuple(node.meta["val"].shape)
    values: Sequence[torch.Tensor] = parent.meta["val"]
    index %= len(values)
    name = parent.target.overloadpacket.__name__ if isinstance(parent.target, torch._ops.OpOverload) else ""
    if name not in ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind"):
        raise CompileError(f"{node_place(node)}: items of {parent.target} are not known as views")
    position = 1 if name == "unbind" else 2
    dim = parent.args[position] if len(parent.args) > position else parent.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    if name == "unbind":
        return ViewStep(node, aten.select.int, (dim, index), shape)
    start = sum(int(value.shape[dim]) for value in values[:index])
    return ViewStep(node, aten.slice.Tensor, (dim, start, start + int(values[index].shape[dim])), shape)
