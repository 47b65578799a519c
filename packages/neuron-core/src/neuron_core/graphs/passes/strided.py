# SPDX-License-Identifier: Apache-2.0
"""``as_strided`` as a chain of plain views of the tensor that owns the storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import node_place
from neuron_core.graphs.passes.emitter import storage_order
from neuron_core.graphs.passes.views import ViewStep

__all__ = ["strided_steps"]

aten = torch.ops.aten


def strided_steps(node: fx.Node, base: torch.Tensor) -> tuple[ViewStep, ...]:
    """The steps from ``base``, which owns the storage, to the ``as_strided`` node ``node``.

    Every dimension becomes windows (``unfold``) over the flat storage, the widest stride first; the last one is
    a slice. Raises ``CompileError`` when the base has gaps, which a pure graph cannot see, or another element
    size.
    """
    view = node.meta["val"]
    if view.numel() == 0:
        shape = tuple(view.shape)
        return (ViewStep(node, aten.new_zeros.default, (list(shape),), shape),)
    order = storage_order(base)
    if order is None or view.element_size() != base.element_size():
        raise CompileError(
            f"{node_place(node)}: as_strided reads the memory of a tensor of strides {tuple(base.stride())} and "
            f"{base.dtype} as {view.dtype}; index the tensor, or make it contiguous first"
        )
    chain = _Chain(node, base)
    if order != sorted(order):
        chain.add(aten.permute.default, (order,), [base.shape[dim] for dim in order])
    chain.add(aten.reshape.default, (), [base.numel()])
    start = int(view.storage_offset() - base.storage_offset())
    if start < 0 or start + _extent(view, range(view.dim())) > base.numel():
        raise CompileError(f"{node_place(node)}: as_strided reaches beyond the tensor it views")
    chain.slice(0, start, start + _extent(view, range(view.dim())))
    _windows(chain, view)
    if view.dtype != base.dtype:
        chain.steps.append(ViewStep(node, aten.view.dtype, (view.dtype,), tuple(view.shape)))
    return tuple(chain.steps)


class _Chain:
    def __init__(self, node: fx.Node, base: torch.Tensor) -> None:
        self._node = node
        self.shape = list(base.shape)
        self.steps: list[ViewStep] = []

    def add(self, target: Any, rest: tuple[Any, ...], shape: list[int]) -> None:
        if target is aten.reshape.default and shape == self.shape:
            return
        self.shape = shape
        self.steps.append(ViewStep(self._node, target, rest, tuple(shape)))

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> None:
        if (start, end, step) != (0, self.shape[dim], 1):
            size = (end - start + step - 1) // step
            self.add(
                aten.slice.Tensor,
                (dim, start, end, step),
                [*self.shape[:dim], size, *self.shape[dim + 1 :]],
            )


def _windows(chain: _Chain, view: torch.Tensor) -> None:
    """From the flat extent of ``view`` to its shape."""
    dims = list(range(view.dim()))
    moving = sorted(
        (dim for dim in dims if view.shape[dim] != 1 and view.stride(dim) > 0), key=view.stride, reverse=True
    )
    for position, dim in enumerate(moving[:-1]):
        window, step = _extent(view, moving[position + 1 :]), view.stride(dim)
        count = (chain.shape[position] - window) // step + 1
        chain.add(aten.unfold.default, (position, window, step), [*chain.shape[:position], count, window])
        chain.slice(position, 0, view.shape[dim])
    if moving:
        last = len(moving) - 1
        step = view.stride(moving[-1])
        chain.slice(last, 0, (view.shape[moving[-1]] - 1) * step + 1, step)
    still = [dim for dim in dims if dim not in moving]
    arranged = [*moving, *still]
    ones = [1 if dim in still else view.shape[dim] for dim in arranged]
    chain.add(aten.reshape.default, (), ones)
    if any(view.shape[dim] != 1 for dim in still):
        sizes = [view.shape[dim] for dim in arranged]
        chain.add(aten.expand.default, (sizes,), sizes)
    if arranged != dims:
        chain.add(aten.permute.default, ([arranged.index(dim) for dim in dims],), list(view.shape))


def _extent(view: torch.Tensor, dims: Any) -> int:
    """Number of storage elements from the first to the last one that ``dims`` reach."""
    return int(1 + sum((view.shape[dim] - 1) * view.stride(dim) for dim in dims))
