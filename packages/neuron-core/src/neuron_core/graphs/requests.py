# SPDX-License-Identifier: Apache-2.0
"""Request keys: from what is known before capture to a graph key, so that a warm start does not trace.

A request key covers everything that decides what capture would give: the source of the modules and of these
packages, structure, static arguments, input specs, compiler identity and versions. Its record holds what
capture would tell the builder: the graph key, the output specs and the process groups.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neuron_core.graphs.capture import CapturedGraph
from neuron_core.graphs.key import (
    FORMAT,
    GraphKey,
    files_digest,
    normalised_groups,
    op_source_digests,
    reached_ops,
    text_digest,
)
from neuron_core.graphs.program import Part, TensorSpec
from neuron_core.graphs.signature import module_classes
from neuron_core.protocols import Compiler

__all__ = ["GraphRecord", "request_key", "source_digest"]

_OUR_PACKAGES = ("neuron_core", "neuron_parallel", "neuron_models", "neuron_specdecode")


@dataclass(frozen=True)
class GraphRecord:
    """What the builder must know of a graph without capturing it.

    ``shape_free`` is False when the artifact depends on the number of KV blocks although its compiler could
    do without; the builder then asks again with the real specs.
    """

    key: GraphKey
    output_specs: tuple[TensorSpec, ...]
    groups: tuple[str, ...]
    op_sources: tuple[tuple[str, str], ...] = ()
    shape_free: bool = True

    @classmethod
    def of(cls, graph: CapturedGraph, key: GraphKey, shape_free: bool = True) -> GraphRecord:
        """Read it off a captured graph."""
        sources = tuple(op_source_digests(reached_ops(graph)).items())
        return cls(key, graph.output_specs(), graph.groups(), sources, shape_free)

    def is_current(self) -> bool:
        """Whether the operators the graph calls and the groups it spans are still what it was made with."""
        groups = text_digest(json.dumps(normalised_groups(self.groups), sort_keys=True))
        return groups == dict(self.key.components).get("replica_groups") and op_source_digests(
            name for name, _ in self.op_sources
        ) == dict(self.op_sources)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "components": dict(self.key.components),
            "outputs": [spec.to_json() for spec in self.output_specs],
            "groups": list(self.groups),
            "op_sources": dict(self.op_sources),
            "shape_free": self.shape_free,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GraphRecord:
        """The record ``to_json`` described."""
        specs = tuple(TensorSpec.from_json(spec) for spec in data["outputs"])
        sources = tuple(data["op_sources"].items())
        return cls(GraphKey.of(data["components"]), specs, tuple(data["groups"]), sources, data["shape_free"])


def request_key(
    part: Part,
    signature: str,
    specs: Sequence[TensorSpec],
    compiler: Compiler,
    passes: Sequence[str],
) -> str:
    """SHA-256 of everything that decides a part's graph and artifact."""
    facts = {
        "format": FORMAT,
        "torch": torch.__version__,
        "python": sys.version_info[:2],
        "default_dtype": str(torch.get_default_dtype()),
        "signature": signature,
        "outputs": len(part.outputs),
        "shared": part.shared,
        "static": [[name, repr(value)] for name, value in part.static],
        "specs": [spec.to_json() for spec in specs],
        "compiler": [compiler.name, compiler.version(), dict(compiler.flags()), compiler.target()],
        "passes": list(passes),
        "sources": {name: source_digest(name) for name in _source_names(part)},
    }
    return text_digest(json.dumps(facts, sort_keys=True))


@functools.cache
def source_digest(module_name: str) -> str:
    """Digest of the code behind a Python module.

    One of our packages is hashed whole, since a forward may call anything in it; any other module by its
    file, and by its package's ``__version__`` when it has one.
    """
    top = module_name.partition(".")[0]
    package = sys.modules.get(top)
    if top in _OUR_PACKAGES:
        return files_digest([Path(package.__file__).parent]) if package and package.__file__ else "absent"
    file = getattr(sys.modules.get(module_name), "__file__", None)
    content = files_digest([Path(file)]) if file else "interactive"
    return f"{getattr(package, '__version__', '')} {content}"


def _source_names(part: Part) -> list[str]:
    names = {cls.__module__ for cls in module_classes(part.module)}
    ours = {name for name in _OUR_PACKAGES if name in sys.modules}
    others = {name for name in names if name.partition(".")[0] not in (*_OUR_PACKAGES, "torch")}
    return sorted(ours | others)
