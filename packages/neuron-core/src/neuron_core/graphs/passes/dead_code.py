# SPDX-License-Identifier: Apache-2.0
"""Removes operators whose results nobody uses."""

from __future__ import annotations

from torch import fx

from neuron_core.graphs.capture import CapturedGraph
from neuron_core.graphs.passes.schema import is_mutating, schema_of

__all__ = ["DeadCode"]


class DeadCode:
    """Removes what neither an output nor an effect depends on.

    Inputs stay, used or not. An operator that writes a tensor, returns nothing (an assertion, a barrier) or is
    known to torch to have effects stays, and so does what it reads.
    """

    name = "dead_code"

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Remove in reverse order of execution."""
        graph.module.graph.eliminate_dead_code(_has_effect)
        return graph


def _has_effect(node: fx.Node) -> bool:
    schema = schema_of(node)
    return node.is_impure() or is_mutating(node) or (schema is not None and not schema.returns)
