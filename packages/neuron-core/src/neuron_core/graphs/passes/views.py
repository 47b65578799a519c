# SPDX-License-Identifier: Apache-2.0
"""View operators as functions of their base, with the operator that writes a new value back into the base."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import node_place

__all__ = ["Emit", "ViewStep", "emitter", "view_step"]

aten = torch.ops.aten

Emit = Callable[..., fx.Node]
"""``emit(target, *args, **kwargs)`` adds a node with its fake value before the node being rewritten."""

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
    aten.as_strided.default: aten.as_strided_scatter.default,
}


@dataclass(frozen=True)
class ViewStep:
    """One view: ``target(source, *rest, **kwargs)``. ``node`` is the view as captured, for error messages."""

    node: fx.Node
    target: Any
    rest: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def forward(self, emit: Emit, source: fx.Node) -> fx.Node:
        """The view of another value of the same base."""
        if self.target in _SAME:
            return source
        if self.target in _RESHAPES:
            # The new value may have other strides than the captured one, so ``view`` could refuse it.
            return emit(aten.reshape.default, source, list(self.node.meta["val"].shape))
        return emit(self.target, source, *self.rest, **dict(self.kwargs))

    def write_back(self, emit: Emit, source: fx.Node, value: fx.Node) -> fx.Node:
        """``source`` with the viewed elements replaced by ``value``; ``CompileError`` if there is no way."""
        if self.target in _SAME:
            return value
        if self.target in _RESHAPES:
            return emit(aten.reshape.default, value, list(source.meta["val"].shape))
        if self.target is aten.permute.default:
            order = [int(dim) % len(self.rest[0]) for dim in self.rest[0]]
            return emit(aten.permute.default, value, [order.index(dim) for dim in range(len(order))])
        if self.target is aten.transpose.int or self.target is aten.t.default:
            return emit(self.target, value, *self.rest)
        if self.target is aten.view.dtype:
            return emit(aten.view.dtype, value, source.meta["val"].dtype)
        scatter = _SCATTERS.get(self.target)
        if scatter is None:
            raise CompileError(
                f"{node_place(self.node)}: a write through {self.target} cannot be made out of place; "
                "write to the tensor it views"
            )
        return emit(scatter, source, value, *self.rest, **dict(self.kwargs))


def view_step(node: fx.Node) -> ViewStep:
    """The step a view node is; an item of ``split``, ``chunk`` or ``unbind`` becomes a slice or a select."""
    if node.target is not operator.getitem:
        return ViewStep(node, node.target, tuple(node.args[1:]), tuple(node.kwargs.items()))
    parent, index = node.args[0], node.args[1]
    assert isinstance(parent, fx.Node) and isinstance(index, int)
    values = parent.meta["val"]
    index %= len(values)
    dim = parent.args[2] if len(parent.args) > 2 else parent.kwargs.get("dim", 0)
    if parent.target is aten.unbind.int:
        dim = parent.args[1] if len(parent.args) > 1 else parent.kwargs.get("dim", 0)
        return ViewStep(node, aten.select.int, (dim, index))
    if parent.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        raise CompileError(f"{node_place(node)}: items of {parent.target} are not known as views")
    assert isinstance(dim, int)
    start = sum(int(value.shape[dim]) for value in values[:index])
    return ViewStep(node, aten.slice.Tensor, (dim, start, start + int(values[index].shape[dim])))


def emitter(graph: fx.Graph, fake_mode: Any, place: fx.Node) -> Emit:
    """An ``Emit`` that inserts before ``place`` and inherits its source line."""

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(place):
            node = graph.call_function(target, args, kwargs)
        real_args, real_kwargs = fx.node.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with fake_mode, torch.no_grad():
            node.meta["val"] = target(*real_args, **real_kwargs)
        node.meta["stack_trace"] = place.meta.get("stack_trace")
        return node

    return emit
