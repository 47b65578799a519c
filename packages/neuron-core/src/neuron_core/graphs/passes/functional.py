# SPDX-License-Identifier: Apache-2.0
"""The functional form of an operator that writes: which operator it is, how it is called, what it returns."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, can_auto_functionalize

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import node_place
from neuron_core.graphs.passes.emitter import Emit
from neuron_core.graphs.passes.schema import schema_of, written_arguments, written_names

__all__ = ["functional_call", "functional_twin"]

_RENAMED = {"_index_put_impl_": "index_put", "native_batch_norm": "_native_batch_norm_legit_functional"}
_BUILTIN = ("aten", "prims")


def functional_twin(node: fx.Node) -> Any:
    """The functional overload of a mutating node's operator; raises ``CompileError`` if there is none.

    ``ns::op_`` has ``ns::op``, an overload with ``out`` arguments the one without; some operators of torch have
    ``op_functional``.
    """
    target: Any = node.target
    namespace, _, name = target._schema.name.partition("::")
    names = list(dict.fromkeys(_twin_names(name)))
    for twin_name in names:
        packet = getattr(getattr(torch.ops, namespace), twin_name, None)
        if packet is None:
            continue
        overloads = sorted(packet.overloads(), key=lambda overload: overload != target._overloadname)
        for overload in overloads:
            twin = getattr(packet, overload)
            if not twin._schema.is_mutable and _takes_the_same(node, twin):
                return twin
    if namespace not in _BUILTIN and not name.endswith("_") and can_auto_functionalize(target):
        return auto_functionalized
    raise CompileError(
        f"{node_place(node)}: {target} is in place and has no functional twin {namespace}::{names[0]} that takes "
        "its arguments"
    )


def functional_call(emit: Emit, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Emit the functional form of ``node``: its own results, then the new value of each tensor it writes.

    A twin returns the results that are no written argument first, then one value per written argument. Raises
    ``CompileError`` for one that returns anything else.
    """
    twin = functional_twin(node)
    schema = schema_of(node)
    given = dict(_arguments(node))
    num_own = sum(result.alias_info is None for result in schema.returns)
    names = written_names(node)
    if twin is auto_functionalized:
        call = emit(twin, node.target, **dict(_complete(schema, given, schema)))
        single, first_new = False, max(len(schema.returns), 1)
    else:
        num_returned = len(twin._schema.returns)
        if num_returned != num_own + len(names):
            raise CompileError(
                f"{node_place(node)}: the functional twin {twin} returns {num_returned} values; it has to return "
                f"the {num_own} results of {node.target}, then the new value of {', '.join(names)}"
            )
        args, kwargs = _positional(twin._schema, dict(_complete(schema, given, twin._schema)))
        call = emit(twin, *args, **kwargs)
        single, first_new = num_returned == 1, num_own

    def result(index: int, item: int | None = None) -> fx.Node:
        value = call if single else emit(operator.getitem, call, index)
        return value if item is None else emit(operator.getitem, value, item)

    values = [
        result(first_new + names.index(tensor.argument), tensor.item) for tensor in written_arguments(node)
    ]
    return [result(index) for index in range(num_own)], values


def _twin_names(name: str) -> Iterator[str]:
    if name in _RENAMED:
        yield _RENAMED[name]
    if name.startswith("__i") and name.endswith("__"):
        yield f"__{name[3:]}"
    stem = name.removesuffix("_")
    yield stem
    yield f"{stem}_functional"


def _takes_the_same(node: fx.Node, twin: Any) -> bool:
    """Whether a twin can be called with the arguments of ``node``, the outputs it is given left out."""
    schema = schema_of(node)
    mine = [a for a in schema.arguments if not a.is_out]
    given = {name for name, value in _arguments(node) if value is not None}
    theirs = {a.name: a for a in twin._schema.arguments}
    for argument in mine:
        other = theirs.pop(argument.name, None)
        if other is None:
            if (
                argument.name != "unsafe"
            ):  # ``_index_put_impl_`` says so of its indices; ``index_put`` checks them
                return False
        elif str(argument.type) not in (
            str(other.type),
            f"Optional[{other.type}]" if other.name in given else "",
        ):
            return False
    return all(argument.has_default_value() for argument in theirs.values())


def _arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The arguments a node gives, by name."""
    schema = schema_of(node)
    for argument, value in zip(schema.arguments, node.args, strict=False):
        yield argument.name, value
    yield from node.kwargs.items()


def _complete(schema: Any, given: dict[str, Any], wanted: Any) -> Iterator[tuple[str, Any]]:
    """Arguments for ``wanted``; a default of ``schema`` is spelled out where the other one differs."""
    defaults = {a.name: a for a in schema.arguments}
    for argument in wanted.arguments:
        own = defaults.get(argument.name)
        if argument.name in given:
            yield argument.name, given[argument.name]
        elif own is not None and own.has_default_value():
            same = argument.has_default_value() and argument.default_value == own.default_value
            if not same or wanted is schema:
                yield argument.name, own.default_value


def _positional(schema: Any, given: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    args: list[Any] = []
    for argument in schema.arguments:
        if argument.kwarg_only or argument.name not in given:
            break
        args.append(given.pop(argument.name))
    return args, given
