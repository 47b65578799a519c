# SPDX-License-Identifier: Apache-2.0
"""Replaces every in-place operator by its out-of-place twin, so that the graph is pure.

Each storage has one current value. A write through a view computes the view's new value and puts it back into
the base, step by step; a later use of the base or of any view of it is made again from the current value.
"""

from __future__ import annotations

import operator
from itertools import combinations
from typing import Any

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import CapturedGraph, node_place
from neuron_core.graphs.passes.emitter import Emit, emitter, evaluate, with_layout
from neuron_core.graphs.passes.functional import functional_call, functional_twin
from neuron_core.graphs.passes.memory import share_elements
from neuron_core.graphs.passes.schema import (
    Written,
    alias_source,
    changes_shape_in_place,
    is_mutating,
    mutated_inputs,
    returned_argument,
    view_in_place,
    written_arguments,
)
from neuron_core.graphs.passes.strided import strided_steps
from neuron_core.graphs.passes.views import ViewStep, item_step, step_of
from neuron_core.graphs.passes.write_back import write_back

__all__ = ["WRITES", "OutOfPlace", "functional_twin"]

WRITES = "neuron_writes"
"""Node meta key; names of ``(operator, view, previous)``: the node is ``previous`` with ``view`` replaced."""

aten = torch.ops.aten
_BUILTIN = ("aten", "prims")


class OutOfPlace:
    """In-place to out-of-place: ``op_`` and ``ns::op_`` become ``op`` and ``ns::op``.

    Alias analysis has to run before it. Raises ``CompileError`` naming node and source line for an operator
    without a functional form and for a write through a view that has no inverse.
    """

    name = "out_of_place"

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Rewrite in execution order; afterwards no operator mutates anything."""
        kept = [graph.placeholders()[index] for index in graph.io_map.values()]
        for placeholder, node in mutated_inputs(graph).items():
            if placeholder not in kept:
                name = placeholder.meta.get("input_name", placeholder.name)
                raise CompileError(
                    f"{graph.label}: {node_place(node)} writes input {name!r}, whose new value is no output: run "
                    f"alias_analysis before {self.name}"
                )
        if any(is_mutating(node) for node in graph.module.graph.nodes):
            _Rewriter(graph).run()
            graph.module.graph.eliminate_dead_code()
        for node in graph.module.graph.nodes:
            if is_mutating(node):
                raise CompileError(f"{graph.label}: {node_place(node)} still mutates after {self.name}")
        return graph


class _Tensor:
    """A tensor of the captured program: the owner of a storage, or ``steps`` of the view ``parent``.

    ``value`` is its node as of the moment its storage had the value ``seen``; ``captured`` the fake tensor it
    was at capture.
    """

    def __init__(
        self, node: fx.Node, parent: _Tensor | None = None, steps: tuple[ViewStep, ...] = ()
    ) -> None:
        self.node, self.value = node, node
        self.captured: Any = node.meta["val"]
        self.parent, self.steps = parent, steps
        self.root: _Tensor = self if parent is None else parent.root
        self.seen: fx.Node | None = self.root.value

    @property
    def fresh(self) -> bool:
        return self.parent is None or self.seen is self.root.value

    def set(self, value: fx.Node) -> None:
        self.value, self.seen = value, self.root.value


class _Rewriter:
    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph
        self._fx = graph.module.graph
        self._tensors: dict[fx.Node, _Tensor] = {}
        # Of an operator that writes and has several results: what each result is.
        self._results: dict[fx.Node, list[_Tensor]] = {}
        # Nodes whose strides are no longer those of capture.
        self._moved: set[fx.Node] = set()

    def run(self) -> None:
        captured = list(self._fx.nodes)
        for node in captured:
            if node.op == "call_function":
                self._visit(node)
            elif node.op == "output":
                self._refresh_arguments(node)
            else:
                self._tensors[node] = _Tensor(node)
        # Dead-code elimination keeps mutating nodes, so they and the stale views of them go here.
        for node in reversed(captured):
            if node.op == "call_function" and not node.users and self._is_replaced(node):
                self._fx.erase_node(node)

    def _is_replaced(self, node: fx.Node) -> bool:
        is_result = node.target is operator.getitem and node.args[0] in self._results
        return is_result or is_mutating(node) or alias_source(node) is not None

    def _visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node.args[0] in self._results:
            assert isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int)
            self._tensors[node] = self._results[node.args[0]][node.args[1]]
            return
        source = alias_source(node)
        if changes_shape_in_place(node):
            target = view_in_place(node)
            assert source is not None
            self._refuse_input(node, source)
            self._view(node, source, target)
        elif written := written_arguments(node):
            self._write(node, written)
        elif source is None:
            self._pure(node)
        elif isinstance(node.meta["val"], tuple | list):
            # The list itself is never read after a write: its items are made again as slices of the source.
            changed = self._refresh_arguments(node)
            self._tensors[node] = _Tensor(node, self._tensors[source])
            if changed or source in self._moved:
                self._tensors[node].seen = None
        else:
            self._view(node, source, node.target)

    def _emitter(self, place: fx.Node, cause: fx.Node | None = None) -> Emit:
        return emitter(self._fx, self._graph.fake_mode, place, cause)

    def _pure(self, node: fx.Node) -> None:
        """Other strides of an argument may change those of the result, on which later views rely."""
        changed = self._refresh_arguments(node)
        tensor = self._tensors[node] = _Tensor(node)
        if not changed and not any(argument in self._moved for argument in node.all_input_nodes):
            return
        node.meta["val"] = evaluate(node, self._graph.fake_mode)
        if isinstance(tensor.captured, torch.Tensor):
            tensor.value = with_layout(self._emitter(node.next, node), node, tensor.captured)
            if tensor.value is not node or node.meta["val"].stride() == tensor.captured.stride():
                return
        self._moved.add(node)

    def _view(self, node: fx.Node, source: fx.Node, target: Any) -> None:
        emit = self._emitter(node)
        steps: tuple[ViewStep, ...]
        if node.target is operator.getitem:
            views = self._tensors[node.all_input_nodes[0]]
            assert views.parent is not None
            current, parent, steps = views.fresh, views.parent, (item_step(node),)
        elif target is aten.as_strided.default:
            current, parent = False, self._tensors[source].root
            steps = strided_steps(node, parent.captured)
        else:
            parent = self._tensors[source]
            current = self._fresh(parent, emit) is source and target is node.target
            steps = (step_of(node, target),)
        tensor = _Tensor(node, parent, steps)
        self._tensors[node] = tensor
        if not current or source in self._moved:
            tensor.seen = None
            self._fresh(tensor, emit)

    def _refresh_arguments(self, node: fx.Node) -> bool:
        emit = self._emitter(node)
        old = node.args, node.kwargs

        def fresh(argument: fx.Node) -> fx.Node:
            return self._fresh(self._tensors[argument], emit)

        node.args = fx.node.map_arg(node.args, fresh)
        node.kwargs = fx.node.map_arg(node.kwargs, fresh)
        return (node.args, node.kwargs) != old

    def _fresh(self, tensor: _Tensor, emit: Emit) -> fx.Node:
        if not tensor.fresh:
            assert tensor.parent is not None
            value = self._fresh(tensor.parent, emit)
            for step in tensor.steps:
                value = step.forward(emit, value)
            tensor.set(value)
        return tensor.value

    def _rederive(self, tensor: _Tensor, emit: Emit) -> None:
        """Make a view again from its base although a value is at hand, so that it is a view of memory."""
        if tensor.parent is not None:
            self._rederive(tensor.parent, emit)
            tensor.seen = None
            self._fresh(tensor, emit)

    def _write(self, node: fx.Node, written: tuple[Written, ...]) -> None:
        emit = self._emitter(node)
        tensors = [self._tensors[argument.node] for argument in written]
        self._refuse_overlap(node, written)
        for tensor in tensors if node.target.namespace not in _BUILTIN else ():  # type: ignore[union-attr]
            self._rederive(tensor, emit)
        views = [self._fresh(tensor, emit) for tensor in tensors]
        schema: Any = node.target._schema  # type: ignore[union-attr]
        sources = [returned_argument(node, index) for index in range(len(schema.returns))]
        aliases = [None if source is None else self._tensors[source] for source in sources]
        self._refresh_arguments(node)
        own, values = functional_call(emit, node)
        for tensor, view, value in zip(tensors, views, values, strict=True):
            self._store(node, tensor, view, _conform(emit, node, view, value))
        fresh = iter(own)
        results = [_Tensor(next(fresh)) if alias is None else alias for alias in aliases]
        if len(results) == 1:
            self._tensors[node] = results[0]
        else:
            self._results[node] = results

    def _store(self, node: fx.Node, tensor: _Tensor, view: fx.Node, value: fx.Node) -> None:
        """Make ``value`` the current value of a tensor, and what follows from it that of its base."""
        emit = self._emitter(node)
        root, previous, written = tensor.root, tensor.root.value, value.name
        value = with_layout(emit, value, tensor.captured)
        path: list[_Tensor] = []
        at = tensor
        while at.parent is not None:
            path.insert(0, at)
            at = at.parent
        steps = [step for item in path for step in item.steps]
        sources: list[fx.Node] = []
        for item in path:
            assert item.parent is not None
            source = self._fresh(item.parent, emit)
            for step in item.steps:
                sources.append(source)
                source = step.forward(emit, source)
        updated = with_layout(emit, write_back(emit, node, steps, sources, value), root.captured)
        updated.meta[WRITES] = (written, view.name, previous.name)
        root.value = updated
        if tensor is not root:
            tensor.set(value)

    def _refuse_input(self, node: fx.Node, source: fx.Node) -> None:
        before, after = self._tensors[source].captured, node.meta["val"]
        same = before.shape == after.shape and before.stride() == after.stride()
        if self._tensors[source].node.op == "placeholder" and not same:
            raise CompileError(
                f"{node_place(node)}: {node.target} changes the shape of an input, which its owner would not see; "
                "use the operator that returns a view"
            )

    def _refuse_overlap(self, node: fx.Node, written: tuple[Written, ...]) -> None:
        for first, second in combinations(written, 2):
            same = self._tensors[first.node].root is self._tensors[second.node].root
            if same and share_elements(first.node.meta["val"], second.node.meta["val"]):
                raise CompileError(
                    f"{node_place(node)}: {node.target} writes {first.node.name} and {second.node.name}, which share "
                    "elements"
                )


def _conform(emit: Emit, node: fx.Node, view: fx.Node, value: fx.Node) -> fx.Node:
    old, new = view.meta["val"], value.meta["val"]
    if not isinstance(new, torch.Tensor) or new.shape != old.shape:
        raise CompileError(f"{node_place(node)}: the functional twin of {node.target} returns another shape")
    return value if new.dtype == old.dtype else emit(aten._to_copy.default, value, dtype=old.dtype)
