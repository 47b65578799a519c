# SPDX-License-Identifier: Apache-2.0
"""Replaces every in-place operator by its out-of-place twin, so that the graph is pure.

Each storage has one current value. A write through a view computes the view's new value and puts it back into
the base, step by step; a later use of the base or of any view of it is made again from the current value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import CapturedGraph, node_place
from neuron_core.graphs.passes.alias import alias_source, mutated_argument
from neuron_core.graphs.passes.views import Emit, ViewStep, emitter, view_step

__all__ = ["WRITES", "OutOfPlace", "functional_twin"]

WRITES = "neuron_writes"
"""Node meta key; names of ``(operator, view, previous)``: the node is ``previous`` with ``view`` replaced."""

aten = torch.ops.aten


class OutOfPlace:
    """In-place to out-of-place: ``op_`` and ``ns::op_`` become ``op`` and ``ns::op``.

    Raises ``CompileError`` naming node and source line for an operator without a functional twin and for a
    write through a view that has no inverse.
    """

    name = "out_of_place"

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Rewrite in execution order; afterwards no operator mutates anything."""
        _Rewriter(graph).run()
        graph.module.graph.eliminate_dead_code()
        for node in graph.module.graph.nodes:
            if mutated_argument(node) is not None:
                raise CompileError(f"{graph.label}: {node_place(node)} still mutates after {self.name}")
        return graph


def functional_twin(node: fx.Node) -> Any:
    """The functional overload of a mutating node's operator; raises ``CompileError`` if there is none."""
    target: Any = node.target
    namespace, _, name = target._schema.name.partition("::")
    twin_name = (
        name.removesuffix("_").removeprefix("_") if name == "_index_put_impl_" else name.removesuffix("_")
    )
    packet = getattr(getattr(torch.ops, namespace), twin_name, None) if name.endswith("_") else None
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    if overload is None:
        raise CompileError(
            f"{node_place(node)}: {target} is in place and has no functional twin {namespace}::{twin_name}"
        )
    return overload


class _Rewriter:
    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph
        self._fx = graph.module.graph
        self._base: dict[fx.Node, fx.Node] = {}
        self._steps: dict[fx.Node, tuple[ViewStep, ...]] = {}
        self._current: dict[fx.Node, fx.Node] = {}
        self._version: dict[fx.Node, int] = {}
        # Per alias: the version of its base it was last computed for, and the node that holds it.
        self._latest: dict[fx.Node, tuple[int, fx.Node]] = {}

    def run(self) -> None:
        for node in list(self._fx.nodes):
            if node.op == "placeholder":
                self._own(node)
            elif node.op == "output":
                self._refresh_arguments(node)
            elif node.op == "call_function":
                self._visit(node)
        # Dead-code elimination keeps mutating nodes, so they and the stale views of them go here.
        for node in reversed(list(self._fx.nodes)):
            stale = node.op == "call_function" and not node.users
            if stale and (mutated_argument(node) is not None or alias_source(node) is not None):
                self._fx.erase_node(node)

    def _own(self, node: fx.Node) -> None:
        self._base[node], self._steps[node] = node, ()
        self._current[node], self._version[node] = node, 0
        self._latest[node] = (0, node)

    def _visit(self, node: fx.Node) -> None:
        written = mutated_argument(node)
        source = alias_source(node)
        if written is not None:
            self._write(node, written)
        elif source is None:
            self._refresh_arguments(node)
            self._own(node)
        elif isinstance(node.meta["val"], tuple | list):
            # The list itself is never read after a write: its items are made again as slices of the base.
            self._base[node], self._steps[node] = self._base[source], self._steps[source]
            self._refresh_arguments(node)
            self._latest[node] = (self._version[self._base[node]], node)
        else:
            self._base[node] = self._base[source]
            self._steps[node] = (*self._steps[source], view_step(node))
            self._view(node)

    def _view(self, node: fx.Node) -> None:
        version = self._version[self._base[node]]
        if version == 0:
            self._latest[node] = (0, node)
            return
        # A view taken after a write: the captured node reads the old value.
        self._latest[node] = (-1, node)
        self._fresh(node, emitter(self._fx, self._graph.fake_mode, node))

    def _refresh_arguments(self, node: fx.Node) -> None:
        emit = emitter(self._fx, self._graph.fake_mode, node)

        def fresh(argument: fx.Node) -> fx.Node:
            return self._fresh(argument, emit)

        node.args = fx.node.map_arg(node.args, fresh)
        node.kwargs = fx.node.map_arg(node.kwargs, fresh)

    def _fresh(self, node: fx.Node, emit: Emit) -> fx.Node:
        base = self._base[node]
        version, value = self._latest[node]
        if version != self._version[base]:
            value = self._current[base]
            for step in self._steps[node]:
                value = step.forward(emit, value)
            self._latest[node] = (self._version[base], value)
        return value

    def _write(self, node: fx.Node, written: fx.Node) -> None:
        emit = emitter(self._fx, self._graph.fake_mode, node)
        base, steps = self._base[written], self._steps[written]
        view = self._fresh(written, emit)
        self._refresh_arguments(node)
        value = self._functional(node, view, emit)
        previous = self._current[base]
        chain = [previous]
        for step in steps[:-1]:
            chain.append(step.forward(emit, chain[-1]))
        updated = value
        for step, source in zip(reversed(steps), reversed(chain), strict=True) if steps else ():
            updated = step.write_back(emit, source, updated)
        updated.meta[WRITES] = (value.name, view.name, previous.name)
        self._version[base] += 1
        self._current[base] = updated
        self._latest[base] = (self._version[base], updated)
        self._latest[written] = (self._version[base], value)
        self._base[node], self._steps[node] = base, steps
        self._latest[node] = self._latest[written]

    def _functional(self, node: fx.Node, view: fx.Node, emit: Emit) -> fx.Node:
        target: Any = node.target
        old = view.meta["val"]
        value = emit(functional_twin(node), *node.args, **node.kwargs)
        new = value.meta["val"]
        if not isinstance(new, torch.Tensor) or new.shape != old.shape:
            raise CompileError(f"{node_place(node)}: the functional twin of {target} returns another shape")
        if new.dtype != old.dtype:
            value = emit(aten._to_copy.default, value, dtype=old.dtype)
        return value
