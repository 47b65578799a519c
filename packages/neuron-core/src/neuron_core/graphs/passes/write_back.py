# SPDX-License-Identifier: Apache-2.0
"""Puts the new value of a view back into the tensors it is a view of, innermost first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import node_place
from neuron_core.graphs.passes.emitter import Emit
from neuron_core.graphs.passes.views import ViewStep

__all__ = ["write_back"]

aten = torch.ops.aten

_FILLS = (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)
"""Operators that write one value everywhere, so that elements which share memory agree on it."""

_LARGEST_CHECKED = 1 << 22


def write_back(
    emit: Emit, node: fx.Node, steps: Sequence[ViewStep], sources: Sequence[fx.Node], value: fx.Node
) -> fx.Node:
    """The new value of ``sources[0]``, through a chain of views whose last one becomes ``value``.

    ``steps[i]`` is a view of ``sources[i]``; ``node`` is the write. Raises ``CompileError`` for a view without
    inverse, and for a write to elements that share memory.
    """
    pairs = enumerate(zip(steps, sources, strict=True))
    end = next((i for i, (step, source) in pairs if step.repeats(source.meta["val"])), len(steps))
    if end < len(steps):
        value = _by_position(emit, node, steps[end:], sources[end], value)
    for index in reversed(range(end)):
        value = steps[index].write_back(emit, sources[index], value)
    return value


def _by_position(
    emit: Emit, node: fx.Node, steps: Sequence[ViewStep], source: fx.Node, value: fx.Node
) -> fx.Node:
    """The inverse of any views: the same views of the elements' positions say where each one belongs."""
    shape = list(source.meta["val"].shape)
    if value.meta["val"].dtype != source.meta["val"].dtype:
        value = emit(aten.view.dtype, value, source.meta["val"].dtype)
    moving = _moving(node, steps, source.meta["val"])
    flat = emit(aten.reshape.default, source, [-1])
    ones = emit(aten.ones_like.default, flat, dtype=torch.int64)
    count = emit(aten.cumsum.default, ones, 0)
    positions = emit(aten.reshape.default, emit(aten.sub.Tensor, count, 1), shape)
    for step in moving:
        positions = step.forward(emit, positions)
    where = emit(aten.reshape.default, positions, [-1])
    updated = emit(aten.index_put.default, flat, [where], emit(aten.reshape.default, value, [-1]))
    return emit(aten.reshape.default, updated, shape)


def _moving(node: fx.Node, steps: Sequence[ViewStep], source: torch.Tensor) -> list[ViewStep]:
    """The steps that move elements, checked: none changes their size, and the write is to each one once."""
    sizes = {step.rest[0].itemsize for step in steps if step.target is aten.view.dtype}
    if sizes - {source.element_size()}:
        raise CompileError(
            f"{node_place(node)}: {node.target} writes through {steps[0].target} and a view of elements of another "
            "size; write to the tensor it views"
        )
    moving = [step for step in steps if step.target is not aten.view.dtype]
    if node.target in _FILLS:
        return moving
    positions: Any = torch.arange(source.numel()).reshape(source.shape)
    for step in moving:
        positions = step.forward(_run, positions)
    if positions.numel() > _LARGEST_CHECKED or positions.unique().numel() < positions.numel():
        raise CompileError(
            f"{node_place(node)}: {node.target} writes through {steps[0].target}, where elements share memory; "
            "write to the tensor it views"
        )
    return moving


def _run(target: Any, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)
