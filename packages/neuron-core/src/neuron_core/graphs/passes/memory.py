# SPDX-License-Identifier: Apache-2.0
"""Which tensors share memory: identical ones and those with elements in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor

from neuron_core.graphs.capture import SharedInputs
from neuron_core.graphs.program import Part, TensorSpec
from neuron_core.graphs.signature import tensors_of

__all__ = ["repeated_inputs", "share_elements", "shared_inputs"]

_MAX_WORK = 1 << 20
"""Candidates NumPy may try; beyond that two tensors count as sharing elements."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: in one memory, from byte ``start`` to before ``end``."""

    memory: object
    start: int
    end: int


def shared_inputs(tensors: Sequence[torch.Tensor]) -> SharedInputs:
    """What ``capture`` has to know of inputs that share memory, read off example tensors.

    ``tensors`` are in the order ``[*weights, *inputs]``, real ones or all of one fake mode or ``meta``. Identical
    means storage, offset, shape, stride and dtype; tensors that only lie between each other, as the columns of
    a matrix do, share nothing.
    """
    same_as: dict[int, int] = {}
    overlaps: list[tuple[int, int]] = []
    places = [_place(tensor) for tensor in tensors]
    specs = [TensorSpec.of(tensor) for tensor in tensors]
    for second, place in enumerate(places):
        for first in range(second):
            other = places[first]
            apart = other.memory != place.memory or other.end <= place.start or place.end <= other.start
            if apart or first in same_as:
                continue
            if other == place and specs[first] == specs[second]:
                same_as[second] = first
                overlaps = [pair for pair in overlaps if second not in pair]
                break
            if share_elements(tensors[first], tensors[second]):
                overlaps.append((first, second))
    return SharedInputs(same_as, tuple(overlaps))


def repeated_inputs(part: Part) -> SharedInputs:
    """Inputs of a part that are one value of its program: the same name twice in ``part.inputs``."""
    first: dict[str, int] = {}
    same_as: dict[int, int] = {}
    for index, name in enumerate(part.inputs, start=len(tensors_of(part.module))):
        if first.setdefault(name, index) != index:
            same_as[index] = first[name]
    return SharedInputs(same_as)


def share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have a byte of memory in common; opaque layouts only share with themselves."""
    if torch.strided not in (first.layout, second.layout) or first.layout != second.layout:
        return first is second
    places = _place(first), _place(second)
    if places[0].memory != places[1].memory:
        return False
    lowest = min(place.start for place in places)
    here, there = (
        np.asarray(_Array(place.start - lowest, tensor))
        for place, tensor in zip(places, (first, second), strict=True)
    )
    try:
        return bool(np.shares_memory(here, there, max_work=_MAX_WORK))
    except np.exceptions.TooHardError:
        return True


class _Array:
    """Stands for a tensor in NumPy's address arithmetic; its memory is never read."""

    def __init__(self, offset: int, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "data": (_FIRST_ADDRESS + offset, False),
        }


_FIRST_ADDRESS = 1 << 20


def _place(tensor: torch.Tensor) -> _Place:
    if tensor.layout is not torch.strided:
        return _Place(id(tensor), 0, 1)
    size = tensor.element_size()
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        memory: object = ("storage", tensor.untyped_storage()._cdata)
        start = int(tensor.storage_offset()) * size
    else:
        memory, start = str(tensor.device), tensor.data_ptr()
    if tensor.numel() == 0:
        return _Place(memory, start, start)
    extent = 1 + sum(int(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _Place(memory, start, start + extent * size)
