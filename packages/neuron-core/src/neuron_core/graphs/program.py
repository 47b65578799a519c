# SPDX-License-Identifier: Apache-2.0
"""A model as a straight-line program: parts that pass named tensors on.

A part is the unit of capture, compilation and sharing: parts with the same structure, static arguments and
input specs are captured and compiled once, so 30 equal decoder layers cost one compile.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuron_core.errors import CompileError

__all__ = ["KV_PREFIX", "Part", "Program", "TensorSpec", "contiguous_stride"]

KV_PREFIX = "kv."
"""Values of this prefix are cache tensors, written in place; dimension 0 is the number of blocks."""


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major stride of ``shape``, in elements."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and stride (in elements) of a graph input or output.

    ``layout`` is ``strided``, or the name of an opaque layout (a prepacked weight) whose stride means
    nothing.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    layout: str = "strided"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor (real, meta or fake)."""
        shape = tuple(int(size) for size in tensor.shape)
        if tensor.layout is not torch.strided:
            return cls(
                shape, tensor.dtype, contiguous_stride(shape), str(tensor.layout).removeprefix("torch.")
            )
        return cls(shape, tensor.dtype, tuple(int(step) for step in tensor.stride()))

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        """A row-major tensor."""
        return cls(tuple(shape), dtype, contiguous_stride(tuple(shape)))

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """An uninitialised tensor of this spec; under a fake mode it allocates nothing."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def with_first_dim(self, size: int) -> TensorSpec:
        """The same spec with another dimension 0."""
        return TensorSpec((size, *self.shape[1:]), self.dtype, self.stride, self.layout)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form, read back by ``from_json``."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "stride": list(self.stride),
            "layout": self.layout,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorSpec:
        """The spec ``to_json`` described; raises ``KeyError`` or ``AttributeError`` when it did not."""
        dtype = getattr(torch, data["dtype"])
        return cls(tuple(data["shape"]), dtype, tuple(data["stride"]), data["layout"])


@dataclass(frozen=True, eq=False)
class Part:
    """One module call: ``outputs = module(*[values[i] for i in inputs], **dict(static))``.

    The module returns one tensor when ``outputs`` has one name, else a tuple of as many tensors. ``same_as`` and
    ``overlaps`` say which of ``[*weights, *inputs]``, by position, share memory in every call, as
    ``capture.SharedInputs`` has it.
    """

    name: str
    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    static: tuple[tuple[str, Hashable], ...] = ()
    same_as: tuple[tuple[int, int], ...] = ()
    overlaps: tuple[tuple[int, int], ...] = ()

    @property
    def shared(self) -> tuple[tuple[object, ...], ...]:
        """All that says which of its inputs share memory: names given twice count."""
        return (tuple(self.inputs.index(name) for name in self.inputs), self.same_as, self.overlaps)

    def run(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Call the module eagerly; raises ``CompileError`` when it returns a different number of tensors."""
        result = self.module(*inputs, **dict(self.static))
        outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(outputs) != len(self.outputs) or not all(isinstance(o, torch.Tensor) for o in outputs):
            kinds = ", ".join(type(o).__name__ for o in outputs)
            raise CompileError(f"part {self.name!r} declares outputs {self.outputs} but returned ({kinds})")
        return outputs


@dataclass(frozen=True)
class Program:
    """Parts in execution order and the names of the values that leave.

    A value name may be produced again by a later part (``hidden`` by every layer); readers see the latest.
    """

    parts: tuple[Part, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check that every output is known."""
        known = {name for part in self.parts for name in (*part.inputs, *part.outputs)}
        missing = [name for name in self.outputs if name not in known]
        if missing:
            raise CompileError(f"program outputs {missing} are neither produced nor read by any part")

    def inputs(self) -> tuple[str, ...]:
        """Names that must be supplied, in order of first use."""
        produced: set[str] = set()
        needed: dict[str, None] = {}
        for part in self.parts:
            needed.update((name, None) for name in part.inputs if name not in produced)
            produced.update(part.outputs)
        needed.update((name, None) for name in self.outputs if name not in produced)
        return tuple(needed)

    def run_eager(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Interpret the parts without capture (the oracle of tests); KV tensors in ``values`` are mutated."""
        state = dict(values)
        for part in self.parts:
            state.update(zip(part.outputs, part.run([state[name] for name in part.inputs]), strict=True))
        return {name: state[name] for name in self.outputs}
