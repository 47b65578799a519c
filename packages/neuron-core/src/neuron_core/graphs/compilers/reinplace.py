# SPDX-License-Identifier: Apache-2.0
"""Undoes the out-of-place form where it would copy: the counterpart of ``passes.out_of_place``.

A custom operator whose new value is aliased to an input becomes its in-place twin again, so a KV write
touches only the written tokens. Any other aliased output ends in a ``copy_`` into its input, which Inductor
fuses.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import CapturedGraph, node_place
from neuron_core.graphs.passes.alias import alias_source
from neuron_core.graphs.passes.out_of_place import WRITES

__all__ = ["in_place_twin", "refuse_moved_inputs", "reinplace"]

_BUILTIN = ("aten", "prims")

_COPIES = (
    torch.ops.aten.clone.default,
    torch.ops.aten.copy.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.view.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.expand.default,
)
"""Operators that change no value."""


def in_place_twin(target: Any) -> Any | None:
    """The mutating overload ``ns::name_`` of a custom operator ``ns::name``, or None."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in _BUILTIN:
        return None
    _, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, target.namespace), f"{name}_", None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def reinplace(graph: CapturedGraph) -> fx.GraphModule:
    """A copy of the pure graph that writes its aliased inputs and returns only the part's own outputs."""
    source = graph.module.graph
    copied = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    copied.graph_copy(source, nodes)
    outputs = [nodes[node] for node in graph.output_nodes()]
    copied.output(tuple(outputs))
    by_name = {old.name: new for old, new in nodes.items()}
    placeholders = [node for node in copied.nodes if node.op == "placeholder"]
    for output, index in graph.io_map.items():
        writes = _writes_back_to(outputs[output], placeholders[index], by_name)
        if writes and _rewrite(copied, writes):
            continue
        with copied.inserting_before(copied.output_node()):
            copied.call_function(torch.ops.aten.copy_.default, (placeholders[index], outputs[output]))
    final = copied.output_node().args[0]
    assert isinstance(final, tuple | list)
    copied.output_node().args = (tuple(final[: graph.num_outputs]),)
    copied.eliminate_dead_code()
    copied.lint()
    return fx.GraphModule(torch.nn.Module(), copied)


def refuse_moved_inputs(graph: CapturedGraph) -> None:
    """Refuse ``old = x.clone(); x.copy_(y); y.copy_(old)``, which torch 2.13's Inductor gets wrong.

    It drops the copies and then stores x before it reads it; ``torch.compile`` gives the same wrong result. Raises
    ``CompileError`` naming the node when an input's old value ends unchanged in another input.
    """
    outputs, placeholders = graph.output_nodes(), graph.placeholders()
    mutated = [placeholders[index] for index in graph.io_map.values()]
    for output in graph.io_map:
        value = outputs[output]
        while value.target in _COPIES:
            source = value.args[1 if value.target is torch.ops.aten.copy.default else 0]
            assert isinstance(source, fx.Node)
            value = source
        if value is not outputs[output] and value in mutated:
            raise CompileError(
                f"{graph.label}: {node_place(outputs[output])} stores the old value of a mutated input in another "
                "input, which Inductor reorders; store a computed value, or use the fx compiler"
            )


_Write = tuple[fx.Node, fx.Node, fx.Node, fx.Node]


def _writes_back_to(value: fx.Node, placeholder: fx.Node, by_name: dict[str, fx.Node]) -> list[_Write] | None:
    """The custom writes that lead from an input to its final value, in order."""
    writes: list[_Write] = []
    while value is not placeholder:
        names = value.meta.get(WRITES)
        if names is None or any(name not in by_name for name in names):
            return None
        op, view, previous = (by_name[name] for name in names)
        if in_place_twin(op.target) is None or _mutated_value(op) is not view:
            return None
        writes.append((value, op, view, previous))
        value = previous
    return writes[::-1]


def _mutated_value(op: fx.Node) -> fx.Node | None:
    twin = in_place_twin(op.target)
    for index, argument in enumerate(twin._schema.arguments if twin is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found = op.args[index] if index < len(op.args) else op.kwargs.get(argument.name)
            return found if isinstance(found, fx.Node) else None
    return None


def _rewrite(graph: fx.Graph, writes: list[_Write]) -> bool:
    order = {node: position for position, node in enumerate(graph.nodes)}
    for updated, op, view, previous in writes:
        if not _shares_storage(view, previous) or _read_later(previous, op, updated, order):
            return False
    base = writes[0][3]
    for updated, op, *_ in writes:
        twin, target = in_place_twin(op.target), _mutated_value(op)  # the view, as earlier writes left it
        assert twin is not None and target is not None
        with graph.inserting_before(op):
            graph.call_function(twin, op.args, dict(op.kwargs))
        op.replace_all_uses_with(target)
        if updated is not op:
            updated.replace_all_uses_with(base)
    return True


def _shares_storage(view: fx.Node, base: fx.Node) -> bool:
    node: fx.Node | None = view
    while node is not None and node is not base:
        node = _maybe_view_source(node)
    return node is base


def _maybe_view_source(node: fx.Node) -> fx.Node | None:
    if node.target is torch.ops.aten.reshape.default:
        # ``reshape`` replaces ``view`` in rewritten graphs; of a contiguous tensor it is one.
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source if source.meta["val"].is_contiguous() else None
    return alias_source(node)


def _read_later(previous: fx.Node, op: fx.Node, updated: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether the old value, or a view of it, is read after ``op``; such a reader must not see the write."""
    stack, seen = [previous], set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user is updated or user is op:
                continue
            is_view = _maybe_view_source(user) is node or user.target is operator.getitem
            if is_view and user is not op:
                stack.append(user)
            elif order[user] > order[op]:
                return True
    return False
