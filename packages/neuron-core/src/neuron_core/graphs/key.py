# SPDX-License-Identifier: Apache-2.0
"""``GraphKey``: the content hash a compiled graph is stored under, kept as named components."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import CapturedGraph
from neuron_core.graphs.passes.replica_groups import group_ranks
from neuron_core.ops.sources import op_digest
from neuron_core.protocols import Compiler

__all__ = [
    "GraphKey",
    "canonical_text",
    "files_digest",
    "graph_key",
    "key_facts",
    "normalised_groups",
    "op_source_digests",
    "reached_ops",
    "register_op_sources",
    "text_digest",
]

FORMAT = 1
"""Raised when entries written by older code must not be read."""

_BUILTIN_NAMESPACES = ("aten", "prims", "prim", "_c10d_functional", "higher_order")
_SOURCES = {".py", ".cpp", ".h", ".cc", ".hpp"}
_op_sources: dict[str, Callable[[str], str]] = {}


@dataclass(frozen=True)
class GraphKey:
    """A digest and the digests it is made of, so that a miss can be explained by naming what differs."""

    components: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, components: Mapping[str, str]) -> GraphKey:
        """A key of named component digests."""
        return cls(tuple(sorted(components.items())))

    @property
    def digest(self) -> str:
        """SHA-256 in hex; the name of the cache entry."""
        return text_digest(json.dumps(self.components))

    def differences(self, other: GraphKey) -> tuple[str, ...]:
        """Names of the components that differ."""
        mine, theirs = dict(self.components), dict(other.components)
        return tuple(
            sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        )


def text_digest(text: str) -> str:
    """SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def files_digest(paths: Iterable[Path]) -> str:
    """SHA-256 over the source files in ``paths`` (folders are searched), by relative name and content."""
    digest = hashlib.sha256()
    for root in paths:
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        for file in files:
            if file.suffix in _SOURCES and file.is_file():
                name = file.relative_to(root) if root.is_dir() else Path(file.name)
                digest.update(f"{name}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def register_op_sources(namespace: str, digest: Callable[[str], str]) -> None:
    """Say how the source of a custom operator namespace is identified.

    ``digest`` takes an operator name such as ``neuron::kv_write`` and returns a digest of the code that
    defines it. Capturing an operator of a namespace nobody registered is a ``CompileError``: a changed kernel
    would be missed.
    """
    _op_sources[namespace] = digest


def graph_key(graph: CapturedGraph, compiler: Compiler, passes: Iterable[str]) -> GraphKey:
    """The key of a captured graph after its passes; raises ``CompileError`` for an unregistered namespace."""
    facts = key_facts(graph, compiler, passes)
    facts["graph"] = canonical_text(graph)
    return GraphKey.of({name: text_digest(json.dumps(fact, sort_keys=True)) for name, fact in facts.items()})


def key_facts(graph: CapturedGraph, compiler: Compiler, passes: Iterable[str]) -> dict[str, Any]:
    """What each component of the key but ``graph`` says, JSON-ready, to explain a miss with."""
    return {
        "inputs": [spec.to_json() for spec in graph.input_specs],
        "io_map": [graph.num_outputs, sorted(graph.io_map.items())],
        "compiler": {
            "name": compiler.name,
            "version": compiler.version(),
            "flags": {name: str(value) for name, value in compiler.flags().items()},
        },
        "target": compiler.target(),
        "replica_groups": normalised_groups(graph.groups()),
        "op_sources": op_source_digests(reached_ops(graph)),
        "passes": list(passes),
        "versions": {"torch": torch.__version__, "format": FORMAT},
    }


def canonical_text(graph: CapturedGraph) -> str:
    """The graph as text with node names, group names and device indices normalised."""
    names: dict[fx.Node, str] = {}
    groups = {name: f"group{index}" for index, name in enumerate(graph.groups())}
    lines: list[str] = []
    for index, node in enumerate(graph.module.graph.nodes):
        names[node] = f"%{index}"
        if node.op == "placeholder":
            lines.append(f"%{index} = input")
            continue
        collective = getattr(node.target, "namespace", "").startswith("_c10d")
        arguments = _canonical((node.args, node.kwargs), names, groups if collective else {})
        lines.append(f"%{index} = {node.op} {_target_name(node)} {arguments}")
    return "\n".join(lines)


def normalised_groups(names: Iterable[str]) -> list[list[int]]:
    """Ranks of each process group relative to its lowest, so that replicas of a group share a key.

    Raises ``CompileError`` for a group this process has not created.
    """
    ranks = [group_ranks(name) for name in names]
    return [[rank - min(members) for rank in members] for members in ranks]


def _target_name(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _canonical(value: Any, names: Mapping[fx.Node, str], groups: Mapping[str, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, tuple | list):
        return "(" + ",".join(_canonical(item, names, groups) for item in value) + ")"
    if isinstance(value, dict):
        items = ((key, _canonical(item, names, groups)) for key, item in sorted(value.items()))
        return "{" + ",".join(f"{key}:{item}" for key, item in items) + "}"
    return groups.get(value, repr(value)) if isinstance(value, str) else repr(value)


def reached_ops(graph: CapturedGraph) -> tuple[str, ...]:
    """Names of the custom operators a graph calls, such as ``neuron::kv_write``."""
    calls = (node for node in graph.module.graph.nodes if node.op == "call_function")
    # A higher-order operator, such as auto_functionalized, has the operator it calls among its arguments.
    named = (value for node in calls for value in (node.target, *node.args))
    overloads = (value for value in named if isinstance(value, torch._ops.OpOverload))
    return tuple(sorted({o._schema.name for o in overloads if o.namespace not in _BUILTIN_NAMESPACES}))


def op_source_digests(names: Iterable[str]) -> dict[str, str]:
    """Digest of the source of each operator; raises ``CompileError`` for an unregistered namespace."""
    digests: dict[str, str] = {}
    for name in names:
        namespace = name.partition("::")[0]
        if namespace not in _op_sources:
            raise CompileError(
                f"the source of {name} is unknown: call "
                f"neuron_core.graphs.key.register_op_sources({namespace!r}, digest)"
            )
        digests[name] = _op_sources[namespace](name)
    return digests


register_op_sources("neuron", op_digest)
