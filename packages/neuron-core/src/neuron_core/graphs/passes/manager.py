# SPDX-License-Identifier: Apache-2.0
"""Runs passes in order, times them and checks the graph after each."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from neuron_core.errors import CompileError, ConfigError, unknown_name_hint
from neuron_core.graphs.capture import CapturedGraph
from neuron_core.protocols import GraphPass

__all__ = ["PassManager"]


class PassManager:
    """An ordered list of passes; ``disabled`` names those to skip.

    Raises ``ConfigError`` for a disabled name that no pass has.
    """

    def __init__(self, passes: Sequence[GraphPass], disabled: Collection[str] = ()) -> None:
        names = [graph_pass.name for graph_pass in passes]
        for name in disabled:
            if name not in names:
                raise ConfigError("disabled_passes", name, unknown_name_hint(name, names))
        self.passes = tuple(graph_pass for graph_pass in passes if graph_pass.name not in disabled)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the passes that run, in order; part of the graph key."""
        return tuple(graph_pass.name for graph_pass in self.passes)

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Run every pass on ``graph``; seconds per pass are left in ``graph.pass_seconds``.

        A ``CompileError`` of a pass is raised with the name of the part and its bucket.
        """
        for graph_pass in self.passes:
            start = time.perf_counter()
            try:
                graph = graph_pass.run(graph)
            except CompileError as error:
                if graph.label in str(error):
                    raise
                raise CompileError(f"{graph.label}: {error}") from error
            graph.module.graph.lint()
            graph.module.recompile()
            graph.pass_seconds[graph_pass.name] = time.perf_counter() - start
        return graph
