# SPDX-License-Identifier: Apache-2.0
"""Functional collectives: they return new tensors, can be traced into a graph, and vanish in a group of
one.
"""

import torch
from torch import Tensor

from neuron_parallel.group import ParallelGroup

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: ParallelGroup) -> Tensor:
    """Sum of ``x`` over the ranks; same shape and dtype."""
    if group.size == 1:
        return x
    return _wait(_ops.all_reduce(x.contiguous(), "sum", group.name))


def all_gather(x: Tensor, group: ParallelGroup, dim: int = 0) -> Tensor:
    """The ranks' ``x`` one after the other along ``dim``, in rank order."""
    if group.size == 1:
        return x
    gathered = _wait(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    dim = dim % x.dim()
    if dim == 0:
        return gathered
    parts = gathered.view(group.size, *x.shape).movedim(0, dim)
    return parts.reshape(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :])


def reduce_scatter(x: Tensor, group: ParallelGroup, dim: int = 0) -> Tensor:
    """This rank's equal part along ``dim`` of the sum of ``x`` over the ranks.

    Raises `ValueError` if the extent does not divide by the group's size.
    """
    if group.size == 1:
        return x
    if x.shape[dim] % group.size:
        raise ValueError(
            f"reduce_scatter: extent {x.shape[dim]} of dim {dim} does not divide over {group.size} ranks"
        )
    moved = x.movedim(dim, 0).contiguous()
    return _wait(_ops.reduce_scatter_tensor(moved, "sum", group.size, group.name)).movedim(0, dim)


def _wait(x: Tensor) -> Tensor:
    done: Tensor = _ops.wait_tensor(x)
    return done
