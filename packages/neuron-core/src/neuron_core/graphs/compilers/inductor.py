# SPDX-License-Identifier: Apache-2.0
"""The ``inductor`` compiler, default on the CPU.

Inductor lowers the graph and writes C++ kernels and a Python wrapper. Both are taken over at that point: all
kernels of a graph are built as one extension module inside the entry (one g++ run instead of one per kernel),
and the wrapper is stored as plain source that names the module by relative path. Loading needs neither
Inductor nor a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from neuron_core.devices.cpu import cpu_identity
from neuron_core.errors import CompileError
from neuron_core.graphs.capture import TRACING, CapturedGraph
from neuron_core.graphs.compilers.base import ArtifactMetadata
from neuron_core.graphs.compilers.fx import GRAPH_FILE, load_graph_source, write_graph_source
from neuron_core.graphs.compilers.loader import WRAPPER_FILE, load_wrapper
from neuron_core.graphs.compilers.reinplace import refuse_moved_inputs, reinplace
from neuron_core.protocols import GraphCall

__all__ = ["InductorCompiler"]


class InductorCompiler:
    """Compiles for the host CPU, for a fixed number of OpenMP threads.

    ``toolchain_dir`` holds what is shared between compiles and never loaded at run time (the precompiled
    header, the vector-instruction probe); it may be deleted at any moment between compiles.
    """

    name = "inductor"
    shape_free_inputs = True

    def __init__(self, toolchain_dir: Path, num_threads: int | None = None) -> None:
        self.toolchain_dir = toolchain_dir
        self.num_threads = num_threads if num_threads is not None else torch.get_num_threads()

    def version(self) -> str:
        """Version of the stored form; torch's own version is a component of every key."""
        return "1"

    def flags(self) -> Mapping[str, str]:
        """The Inductor settings used."""
        from neuron_core.graphs.compilers.lowering import SETTINGS

        return {name: str(value) for name, value in SETTINGS.items()}

    def target(self) -> str:
        """Instruction set and thread count the loops are split for."""
        return f"{cpu_identity()} threads={self.num_threads}"

    def describe(self) -> dict[str, Any]:
        """Thread count."""
        return {"num_threads": self.num_threads}

    def compile(self, graph: CapturedGraph, staging: Path) -> None:
        """Write ``wrapper.py``, ``kernels.cpp``, the kernels' shared object and ``graph.json``."""
        ArtifactMetadata.of(graph).write(staging)
        refuse_moved_inputs(graph)
        module = reinplace(graph)
        if all(node.op in ("placeholder", "output") for node in module.graph.nodes):
            write_graph_source(graph, staging)  # nothing to compile: it only passes inputs on
            return
        from neuron_core.graphs.compilers.lowering import lower
        from neuron_core.graphs.compilers.native import build_kernels
        from neuron_core.graphs.compilers.wrapper import split_wrapper

        try:
            # g++, where most of the time goes, runs outside it. Parsing runs inside: in Python 3.11 two threads
            # that build syntax trees at once can fail with "AST constructor recursion depth mismatch".
            with TRACING:
                wrapper = split_wrapper(lower(module, graph, self.toolchain_dir, self.num_threads))
        except CompileError as error:
            raise CompileError(f"{graph.label}: {error}") from error
        (staging / WRAPPER_FILE).write_text(wrapper.source)
        if wrapper.kernels:
            build_kernels(wrapper.kernels, staging, self.toolchain_dir)

    def load(self, entry: Path, groups: Sequence[str] = ()) -> GraphCall:
        """Execute the wrapper in a namespace that holds what it needs; no compiler runs."""
        if (entry / GRAPH_FILE).exists():
            return load_graph_source(entry, groups)
        return load_wrapper(entry, ArtifactMetadata.read(entry), groups)
