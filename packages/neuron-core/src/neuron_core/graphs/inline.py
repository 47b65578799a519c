# SPDX-License-Identifier: Apache-2.0
"""The flat graph of a whole program, for compilers that take one graph per bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import CapturedGraph
from neuron_core.graphs.program import Part, Program, TensorSpec

__all__ = ["inline"]

CapturePart = Callable[[Part, tuple[TensorSpec, ...]], CapturedGraph]


def inline(program: Program, specs: Mapping[str, TensorSpec], capture_part: CapturePart) -> CapturedGraph:
    """Compose the pure graphs of a program's parts into one.

    Inputs are every part's weights as ``part/weight``, then the program's inputs; outputs are the program's,
    then the new value of every mutated input, with one ``io_map`` over the whole. ``capture_part`` gives a
    part's graph after its passes (``GraphBuilder.capture``, or a memo of it, as equal parts may share one).
    Raises ``CompileError`` when a part mutates one of its weights.
    """
    inputs = program.inputs()
    values = {name: specs[name] for name in inputs}
    graphs: list[CapturedGraph] = []
    for part in program.parts:
        graph = capture_part(part, tuple(values[name] for name in part.inputs))
        values.update(zip(part.outputs, graph.output_specs(), strict=True))
        graphs.append(graph)
    return _Composer(program, graphs).compose(specs)


class _Composer:
    def __init__(self, program: Program, graphs: list[CapturedGraph]) -> None:
        self._program = program
        self._graphs = graphs
        self._fx = fx.Graph()
        self._weights: dict[str, fx.Node] = {}
        self._weight_specs: list[TensorSpec] = []
        self._current: dict[str, fx.Node] = {}
        self._produced: set[str] = set()
        self._mutated: dict[str, fx.Node] = {}

    def compose(self, specs: Mapping[str, TensorSpec]) -> CapturedGraph:
        inputs = self._program.inputs()
        self._add_placeholders(inputs)
        for part, graph in zip(self._program.parts, self._graphs, strict=True):
            self._append(part, graph)
        own = [self._current[name] for name in self._program.outputs]
        self._fx.output((*own, *self._mutated.values()))
        self._fx.eliminate_dead_code()
        first_input = len(self._weights)
        io_map = {len(own) + at: first_input + inputs.index(name) for at, name in enumerate(self._mutated)}
        module = fx.GraphModule(torch.nn.Module(), self._fx)
        all_specs = (*self._weight_specs, *(specs[name] for name in inputs))
        first = self._graphs[0]
        return CapturedGraph(
            "program",
            module,
            tuple(self._weights),
            inputs,
            all_specs,
            first.fake_mode,
            len(own),
            bucket=first.bucket,
            io_map=io_map,
        )

    def _add_placeholders(self, inputs: tuple[str, ...]) -> None:
        for position, (part, graph) in enumerate(zip(self._program.parts, self._graphs, strict=True)):
            for name, spec, old in zip(graph.weights, graph.input_specs, graph.placeholders(), strict=False):
                node = self._fx.placeholder(f"weight_{position}_{len(self._weights)}")
                node.meta["val"] = old.meta["val"]
                self._weights[f"{part.name}/{name}"] = node
                self._weight_specs.append(spec)
        for position, name in enumerate(inputs):
            self._current[name] = self._fx.placeholder(f"input_{position}")

    def _append(self, part: Part, graph: CapturedGraph) -> None:
        sources = [self._weights[f"{part.name}/{name}"] for name in graph.weights]
        sources += [self._current[name] for name in part.inputs]
        placeholders = graph.placeholders()
        mapping = dict(zip(placeholders, sources, strict=True))
        for old, new in mapping.items():
            new.meta.setdefault("val", old.meta["val"])
        self._fx.graph_copy(graph.module.graph, mapping)
        results = [mapping[node] for node in graph.output_nodes()]
        for output, index in graph.io_map.items():
            if index < len(graph.weights):
                raise CompileError(
                    f"{graph.label} mutates its weight {graph.weights[index]!r}: pass it as an input"
                )
            name = part.inputs[index - len(graph.weights)]
            self._current[name] = results[output]
            if name not in self._produced:
                self._mutated[name] = results[output]
        self._current.update(zip(part.outputs, results, strict=False))
        self._produced.update(part.outputs)
