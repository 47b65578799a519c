# SPDX-License-Identifier: Apache-2.0
"""Merges inputs that are one tensor."""

from __future__ import annotations

from neuron_core.graphs.capture import CapturedGraph
from neuron_core.graphs.passes.alias import refuse_shared_writes
from neuron_core.graphs.passes.schema import mutated_inputs

__all__ = ["DuplicateInputs"]


class DuplicateInputs:
    """Makes everything that reads a duplicate input (``graph.shared.same_as``) read the one it is identical to.

    The duplicate stays in the list of inputs, so that a compiled graph is called as before; it is not looked
    at. A write to one of them is then a write to both. Raises ``CompileError`` naming both when a written
    input shares elements with one it is not identical to.
    """

    name = "duplicate_inputs"

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Replace the uses; must run before ``alias_analysis``."""
        placeholders = graph.placeholders()
        for index, first in graph.shared.same_as.items():
            placeholders[index].replace_all_uses_with(placeholders[first])
        refuse_shared_writes(graph, mutated_inputs(graph))
        return graph
