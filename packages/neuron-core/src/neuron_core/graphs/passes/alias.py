# SPDX-License-Identifier: Apache-2.0
"""Which inputs a graph mutates, read from operator schemas."""

from __future__ import annotations

import operator

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import CapturedGraph, node_place

__all__ = ["AliasAnalysis", "alias_source", "mutated_argument", "storage_roots"]


def mutated_argument(node: fx.Node) -> fx.Node | None:
    """The argument a node writes in place, or None; raises ``CompileError`` when it writes more than one."""
    schema = _schema(node)
    if schema is None or not schema.is_mutable:
        return None
    written: list[fx.Node] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            written.extend(item for item in _flat(value) if isinstance(item, fx.Node))
    if len(written) > 1:
        raise CompileError(
            f"{node_place(node)}: {node.target} writes {len(written)} tensors; one is supported"
        )
    return written[0] if written else None


def alias_source(node: fx.Node) -> fx.Node | None:
    """The tensor a node's result shares storage with (a view, an in-place result, an item of a split)."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        parent = node.args[0]
        return parent if alias_source(parent) is not None else None
    schema = _schema(node)
    if schema is None or not schema.returns or schema.returns[0].alias_info is None:
        return None
    sets = schema.returns[0].alias_info.before_set
    for index, argument in enumerate(schema.arguments):
        info = argument.alias_info
        # A list of views (split, unbind) has an anonymous alias set, and its source the wildcard one.
        if info is not None and (info.before_set & sets or "*" in info.after_set):
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            return value if isinstance(value, fx.Node) else None
    return None


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node the node that owns its storage: a placeholder or the operator that made it."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = alias_source(node)
        roots[node] = node if source is None else roots[source]
    return roots


class AliasAnalysis:
    """Appends every mutated input to the outputs and records it in ``io_map {output: input}``.

    The part's own outputs keep their places; an input is appended once however often it is written. A write
    through a view counts as a write of the whole input.
    """

    name = "alias_analysis"

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Scan once, in execution order."""
        fx_graph = graph.module.graph
        roots = storage_roots(fx_graph)
        placeholders = {node: index for index, node in enumerate(graph.placeholders())}
        mutated: dict[fx.Node, int] = {}
        for node in fx_graph.nodes:
            written = mutated_argument(node)
            if written is not None and roots[written] in placeholders:
                mutated[roots[written]] = placeholders[roots[written]]
        outputs = graph.output_nodes()
        graph.io_map = {len(outputs) + offset: index for offset, index in enumerate(mutated.values())}
        fx_graph.output_node().args = ((*outputs, *mutated),)
        return graph


def _schema(node: fx.Node) -> torch._C.FunctionSchema | None:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _flat(value: object) -> list[object]:
    return list(value) if isinstance(value, tuple | list) else [value]
