# SPDX-License-Identifier: Apache-2.0
"""The ``fx`` compiler: the pure graph as readable Python, run as it is; for debugging and pass tests."""

from __future__ import annotations

import math
import operator
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from neuron_core.errors import CacheError, CompileError
from neuron_core.graphs.capture import CapturedGraph
from neuron_core.graphs.compilers.base import ArtifactMetadata
from neuron_core.protocols import GraphCall

__all__ = ["GRAPH_FILE", "NAMESPACE", "FxCompiler", "load_graph_source", "write_graph_source"]

GRAPH_FILE = "graph.py"

NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "device": torch.device,
    "math": math,
    "inf": math.inf,
    "nan": math.nan,
    "operator": operator,
    "_operator": operator,
    "NoneType": type(None),
}
"""Globals the source of a stored graph may read."""

_NEVER_USED = {"fx_pytree", "pytree"}
"""Globals torch.fx lists for every graph; only graphs with structured inputs read them."""


class FxCompiler:
    """Runs the graph node by node exactly as the passes left it.

    No decomposition: results equal eager execution bit for bit. Mutated inputs are copied back from their new
    values, so a KV write copies the whole cache: use it to debug, not to serve.
    """

    name = "fx"
    shape_free_inputs = True

    def version(self) -> str:
        """Version of the stored form."""
        return "1"

    def flags(self) -> Mapping[str, str]:
        """It has none."""
        return {}

    def target(self) -> str:
        """Any CPU of this architecture."""
        return platform.machine()

    def describe(self) -> dict[str, Any]:
        """Nothing besides the key."""
        return {}

    def compile(self, graph: CapturedGraph, staging: Path) -> None:
        """Write ``graph.py`` and ``graph.json``."""
        write_graph_source(graph, staging)
        ArtifactMetadata.of(graph).write(staging)

    def load(self, entry: Path, groups: Sequence[str] = ()) -> GraphCall:
        """Execute ``graph.py`` and wrap its function."""
        return load_graph_source(entry, groups)


def write_graph_source(graph: CapturedGraph, staging: Path) -> None:
    """Store a graph as Python text; raises ``CompileError`` when it refers to something text cannot name."""
    code = graph.module.graph.python_code("self")
    unknown = sorted(code.globals.keys() - NAMESPACE.keys() - _NEVER_USED)
    if unknown:
        raise CompileError(
            f"{graph.label}: the graph refers to {', '.join(unknown)}, which cannot be stored as text"
        )
    (staging / GRAPH_FILE).write_text(code.src)


def load_graph_source(entry: Path, groups: Sequence[str] = ()) -> GraphCall:
    """The callable of a stored graph; raises ``CacheError`` when it cannot be read."""
    metadata = ArtifactMetadata.read(entry)
    path = entry / GRAPH_FILE
    namespace = dict(NAMESPACE)
    try:
        source = metadata.rename_groups(path.read_text(), tuple(groups))
        exec(compile(source, str(path), "exec"), namespace)
        forward = namespace["forward"]
    except (OSError, SyntaxError, KeyError) as error:
        raise CacheError(f"{path} is not a stored graph: {error}") from error

    def call(args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        results: tuple[torch.Tensor, ...] = forward(None, *args)
        for output, index in metadata.io_map:
            args[index].copy_(results[output])
        return results[: metadata.num_outputs]

    return call
