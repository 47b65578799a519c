# SPDX-License-Identifier: Apache-2.0
"""Which inputs a graph mutates and which outputs are inputs, read from operator schemas."""

from __future__ import annotations

import torch
from torch import fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import CapturedGraph, node_place
from neuron_core.graphs.passes.schema import alias_source, input_name, mutated_inputs, storage_roots

__all__ = ["AliasAnalysis", "alias_source", "refuse_shared_writes"]


class AliasAnalysis:
    """Appends every mutated input to the outputs, ``io_map {output: input}``, and finds outputs that are inputs.

    The part's own outputs keep their places; an input is appended once however often it is written. A write
    through a view counts as a write of the whole input. ``output_aliases {output: input}`` has the own outputs
    that are all of an input nobody writes; an input has at most one alias in both maps together. Raises
    ``CompileError`` when a written input shares memory with another one.
    """

    name = "alias_analysis"

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Scan once, in execution order; a graph that was analysed before stays as it is."""
        if graph.io_map:
            return graph
        position = {node: index for index, node in enumerate(graph.placeholders())}
        mutated = mutated_inputs(graph)
        refuse_shared_writes(graph, mutated)
        outputs = graph.output_nodes()[: graph.num_outputs]
        roots = storage_roots(graph.module.graph)
        graph.output_aliases = {}
        for output, node in enumerate(outputs):
            root = roots[node]
            taken = root in mutated or position.get(root) in graph.output_aliases.values()
            if root in position and not taken and _is_whole(node.meta["val"], root.meta["val"]):
                graph.output_aliases[output] = position[root]
        graph.io_map = {len(outputs) + offset: position[node] for offset, node in enumerate(mutated)}
        graph.module.graph.output_node().args = ((*outputs, *mutated),)
        return graph


def refuse_shared_writes(graph: CapturedGraph, mutated: dict[fx.Node, fx.Node]) -> None:
    """Raise ``CompileError`` naming both when a written input has elements in common with another one.

    An identical input counts too while anything reads it: ``duplicate_inputs`` makes its readers read the other.
    """
    placeholders = graph.placeholders()
    unmerged = [pair for pair in graph.shared.same_as.items() if placeholders[pair[0]].users]
    for first, second in (*graph.shared.overlaps, *unmerged):
        for written, other in ((first, second), (second, first)):
            node = mutated.get(placeholders[written])
            if node is not None:
                advice = "run duplicate_inputs first" if (first, second) in unmerged else "pass a copy of one"
                raise CompileError(
                    f"{graph.label}: {node_place(node)} writes input {input_name(graph, written)}, which shares memory "
                    f"with input {input_name(graph, other)}: {advice}"
                )


def _is_whole(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view is its base: the same elements in the same shape, without a flipped bit."""
    return (
        view.shape == base.shape
        and view.stride() == base.stride()
        and view.storage_offset() == base.storage_offset()
        and view.dtype == base.dtype
        and view.is_conj() == base.is_conj()
        and view.is_neg() == base.is_neg()
    )
