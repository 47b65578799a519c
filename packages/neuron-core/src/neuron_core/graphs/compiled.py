# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs and the compiled program that calls them in order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neuron_core.errors import CompileError
from neuron_core.graphs.key import GraphKey
from neuron_core.graphs.program import Program, TensorSpec
from neuron_core.graphs.signature import tensors_of
from neuron_core.protocols import GraphCall

__all__ = ["CompiledGraph", "CompiledProgram", "Watch"]

Watch = Callable[[int, GraphCall, list[torch.Tensor]], Sequence[torch.Tensor]]
"""``watch(index, call, [*weights, *inputs])``: runs the program's part of that index and returns what it gave."""


@dataclass(frozen=True, eq=False)
class CompiledGraph:
    """A loaded artifact; ``compiled`` says whether this process compiled it, in ``seconds``."""

    name: str
    call: GraphCall
    key: GraphKey
    output_specs: tuple[TensorSpec, ...]
    path: Path
    compiled: bool
    seconds: float


class CompiledProgram:
    """One bucket's parts, called in order on named tensors.

    Weights are taken from the parts' modules when the program is made and kept; replacing a parameter
    afterwards has no effect, writing into it has. Calls may run concurrently: nothing is kept between them.
    """

    def __init__(self, program: Program, graphs: Sequence[CompiledGraph]) -> None:
        self.graphs = tuple(graphs)
        names = dict.fromkeys((*program.inputs(), *(name for part in program.parts for name in part.outputs)))
        slot = {name: index for index, name in enumerate(names)}
        self._slot = slot
        self._template: list[Any] = [None] * len(slot)
        self._free = [(name, slot[name]) for name in program.inputs()]
        self._outputs = [(name, slot[name]) for name in program.outputs]
        self._calls = [
            (
                graph.call,
                [tensor.detach() for tensor in tensors_of(part.module).values()],
                _getter([slot[name] for name in part.inputs]),
                [slot[name] for name in part.outputs],
            )
            for part, graph in zip(program.parts, graphs, strict=True)
        ]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names a call must supply: the program's inputs that are not bound."""
        return tuple(name for name, _ in self._free)

    def bind(self, values: Mapping[str, torch.Tensor]) -> None:
        """Fix inputs that stay the same, such as KV tensors; a second bind replaces the first.

        Raises ``CompileError`` for a name that is not an input of the program.
        """
        for name, tensor in values.items():
            if name not in self._slot:
                raise CompileError(
                    f"bind: the program has no input {name!r}; it has {', '.join(self.inputs)}"
                )
            self._template[self._slot[name]] = tensor
        self._free = [(name, slot) for name, slot in self._free if name not in values]

    def __call__(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run a step on the unbound inputs, other names are ignored; returns the program's outputs.

        Raises ``KeyError`` with the name of a missing input. Shapes are not checked: they come from the
        bucket.
        """
        slots = self._filled(values)
        for call, weights, inputs, outputs in self._calls:
            for slot, result in zip(outputs, call([*weights, *inputs(slots)]), strict=False):
                slots[slot] = result
        return {name: slots[slot] for name, slot in self._outputs}

    def watched(self, values: Mapping[str, torch.Tensor], watch: Watch) -> dict[str, torch.Tensor]:
        """As a call, with each graph run by ``watch`` instead."""
        slots = self._filled(values)
        for index, (call, weights, inputs, outputs) in enumerate(self._calls):
            for slot, result in zip(outputs, watch(index, call, [*weights, *inputs(slots)]), strict=False):
                slots[slot] = result
        return {name: slots[slot] for name, slot in self._outputs}

    def _filled(self, values: Mapping[str, torch.Tensor]) -> list[Any]:
        slots = self._template.copy()
        for name, slot in self._free:
            slots[slot] = values[name]
        return slots


def _getter(slots: list[int]) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """Picks ``slots`` out of a list, in C where ``itemgetter`` returns a tuple."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    return lambda values: [values[slot] for slot in slots]
