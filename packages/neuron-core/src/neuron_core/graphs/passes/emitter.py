# SPDX-License-Identifier: Apache-2.0
"""Adding nodes with their fake values, and layouts: a value is given the strides that capture saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import node_place

__all__ = ["Emit", "contiguous", "emitter", "evaluate", "storage_order", "with_layout"]

aten = torch.ops.aten

Emit = Callable[..., fx.Node]
"""``emit(target, *args, **kwargs)`` adds a node with its fake value before the node being rewritten."""


def emitter(graph: fx.Graph, fake_mode: Any, place: fx.Node, cause: fx.Node | None = None) -> Emit:
    """An ``Emit`` that inserts before ``place`` and inherits the source line of ``cause`` (default ``place``)."""
    line = (cause if cause is not None else place).meta.get("stack_trace")

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(place):
            node = graph.call_function(target, args, kwargs)
        node.meta["stack_trace"] = line
        node.meta["val"] = evaluate(node, fake_mode)
        return node

    return emit


def evaluate(node: fx.Node, fake_mode: Any) -> Any:
    """The fake value of a node from those of its arguments; raises ``CompileError`` when there is none.

    A node keeps the device it was captured on, whatever device its arguments name by now.
    """
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    old = node.meta.get("val")
    if isinstance(old, torch.Tensor):
        captured_on = old.device
        args, kwargs = fx.node.map_aggregate(
            (args, kwargs), lambda value: captured_on if isinstance(value, torch.device) else value
        )
    target: Any = node.target
    try:
        with fake_mode, torch.no_grad():
            return target(*args, **kwargs)
    except Exception as error:
        raise CompileError(f"{node_place(node)}: {target} cannot be made out of place: {error}") from error


def storage_order(value: torch.Tensor) -> list[int] | None:
    """Dimensions from the outermost in memory to the innermost; None unless every element is used once."""
    order = sorted(range(value.dim()), key=lambda dim: (value.stride(dim), value.shape[dim]), reverse=True)
    step = 1
    for dim in reversed(order):
        if value.shape[dim] != 1 and value.stride(dim) != step:
            return None if value.numel() else order
        step *= value.shape[dim]
    return order


def contiguous(emit: Emit, node: fx.Node) -> fx.Node:
    """``node``, copied when it is not row-major."""
    if node.meta["val"].is_contiguous():
        return node
    return emit(aten.clone.default, node, memory_format=torch.contiguous_format)


def with_layout(emit: Emit, node: fx.Node, like: torch.Tensor) -> fx.Node:
    """``node``, copied when its strides are not those of ``like``; a ``like`` with gaps asks for nothing."""
    value = node.meta["val"]
    order = storage_order(like)
    sizes = zip(value.shape, value.stride(), like.stride(), strict=True)
    if order is None or value.numel() == 0 or all(size == 1 or old == new for size, old, new in sizes):
        return node
    if order == sorted(order):
        return contiguous(emit, node)
    dense = contiguous(emit, emit(aten.permute.default, node, order))
    return emit(aten.permute.default, dense, [order.index(dim) for dim in range(len(order))])
