# SPDX-License-Identifier: Apache-2.0
"""What an operator's schema says about memory: the arguments it writes and the results that share storage."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import CapturedGraph, node_place

__all__ = [
    "Written",
    "alias_source",
    "changes_shape_in_place",
    "input_name",
    "is_mutating",
    "mutated_inputs",
    "returned_argument",
    "schema_of",
    "storage_roots",
    "view_in_place",
    "written_arguments",
    "written_names",
]

aten = torch.ops.aten

_UNDECLARED_WRITES = {aten.native_batch_norm.default: ("running_mean", "running_var")}
"""Operators that write what their schema does not mark; both only when ``training`` is true."""

_UNDECLARED_VIEWS = (
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
)
"""Operators whose results share storage with their argument although their schema does not say so."""

_VIEWS_IN_PLACE = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
    aten.detach_.default: aten.detach.default,
}
"""Operators that turn a tensor object into a view of itself; no element is written."""


@dataclass(frozen=True)
class Written:
    """A tensor that a node writes: the schema argument, and for a list the place in it."""

    argument: str
    item: int | None
    node: fx.Node


def schema_of(node: fx.Node) -> Any:
    """The schema of the operator a node calls, or None."""
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def written_names(node: fx.Node) -> tuple[str, ...]:
    """Schema arguments a node writes, whether or not they are given; empty for a change of shape in place."""
    schema = schema_of(node)
    if schema is None or changes_shape_in_place(node):
        return ()
    if node.target in _UNDECLARED_WRITES:
        training = _argument(node, schema, [a.name for a in schema.arguments].index("training"))
        return _UNDECLARED_WRITES[node.target] if training else ()
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def written_arguments(node: fx.Node) -> tuple[Written, ...]:
    """Every tensor a node writes, in schema order, the items of a list one by one."""
    names = written_names(node)
    return tuple(_tensors_written(node, names)) if names else ()


def is_mutating(node: fx.Node) -> bool:
    """Whether a node writes a tensor or changes the shape of one."""
    return bool(written_arguments(node)) or changes_shape_in_place(node)


def changes_shape_in_place(node: fx.Node) -> bool:
    """Whether a node changes shape or strides of its argument, as ``t_``, ``resize_`` and ``set_`` do."""
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def view_in_place(node: fx.Node) -> Any:
    """The view operator that ``t_`` and the like apply to their argument; ``CompileError`` if it is none."""
    if node.target not in _VIEWS_IN_PLACE:
        raise CompileError(f"{node_place(node)}: {node.target} changes the shape of a tensor in place")
    return _VIEWS_IN_PLACE[node.target]


def returned_argument(node: fx.Node, index: int) -> fx.Node | None:
    """The argument that result ``index`` of a node shares storage with, or None for memory of its own.

    Raises ``CompileError`` when the schema leaves open which of several tensors it is.
    """
    schema = schema_of(node)
    if schema is None or index >= len(schema.returns):
        return None
    if node.target in _UNDECLARED_VIEWS:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    info = schema.returns[index].alias_info
    if info is None:
        return None
    found: list[object] = []
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        # A list of views (split, unbind) has an anonymous alias set, and its source the wildcard one.
        if alias is not None and (alias.before_set & info.before_set or "*" in alias.after_set):
            value = _argument(node, schema, position)
            found.extend(value if isinstance(value, tuple | list) else [value])
    sources = [value for value in found if isinstance(value, fx.Node)]
    if len(sources) > 1:
        names = ", ".join(source.name for source in sources)
        raise CompileError(f"{node_place(node)}: the result of {node.target} may be a view of any of {names}")
    return sources[0] if sources else None


def alias_source(node: fx.Node) -> fx.Node | None:
    """The tensor a node's result shares storage with (a view, an in-place result, an item of a split)."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        parent, index = node.args
        if not isinstance(parent, fx.Node) or not isinstance(index, int):
            return None
        schema = schema_of(parent)
        return returned_argument(parent, 0 if schema is None or len(schema.returns) == 1 else index)
    schema = schema_of(node)
    return returned_argument(node, 0) if schema is not None and len(schema.returns) == 1 else None


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node the node that owns its storage: a placeholder or the operator that made it."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = alias_source(node)
        roots[node] = node if source is None else roots[source]
    return roots


def mutated_inputs(graph: CapturedGraph) -> dict[fx.Node, fx.Node]:
    """Placeholders that are written, directly or through a view, each with the first node that writes it."""
    roots = storage_roots(graph.module.graph)
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.module.graph.nodes:
        for written in written_arguments(node):
            root = roots[written.node]
            if root.op == "placeholder":
                first.setdefault(root, node)
    return first


def input_name(graph: CapturedGraph, index: int) -> str:
    """How errors name input ``index`` of ``[*weights, *inputs]``."""
    names = (*graph.weights, *graph.inputs)
    return f"{names[index]!r} (number {index})"


def _tensors_written(node: fx.Node, names: tuple[str, ...]) -> Iterator[Written]:
    schema = schema_of(node)
    for position, argument in enumerate(schema.arguments):
        if argument.name not in names:
            continue
        value = _argument(node, schema, position)
        if isinstance(value, fx.Node):
            yield Written(argument.name, None, value)
        elif isinstance(value, tuple | list):
            for item, tensor in enumerate(value):
                if isinstance(tensor, fx.Node):
                    yield Written(argument.name, item, tensor)


def _argument(node: fx.Node, schema: Any, position: int) -> object:
    if position < len(node.args):
        return node.args[position]
    argument = schema.arguments[position]
    return node.kwargs.get(argument.name, argument.default_value)
