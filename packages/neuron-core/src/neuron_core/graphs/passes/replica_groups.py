# SPDX-License-Identifier: Apache-2.0
"""Records the process groups a graph communicates over."""

from __future__ import annotations

from typing import Any

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import CapturedGraph, ReplicaGroup, group_name, node_place

__all__ = ["ReplicaGroups", "group_ranks"]


class ReplicaGroups:
    """Puts the groups of all collectives into ``graph.replica_groups``, in order of first use, with their ranks.

    A collective is an operator with an argument ``group_name``. Raises ``CompileError`` naming the node for a
    group this process has not created.
    """

    name = "replica_groups"

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Scan in execution order."""
        found: dict[str, ReplicaGroup] = {}
        for node in graph.module.graph.nodes:
            name = group_name(node)
            if name is None or name in found:
                continue
            try:
                found[name] = ReplicaGroup(name, group_ranks(name))
            except CompileError as error:
                raise CompileError(f"{graph.label}: {node_place(node)}: {error}") from error
        graph.replica_groups = tuple(found.values())
        return graph


def group_ranks(name: str) -> tuple[int, ...]:
    """Global ranks of a process group by name; raises ``CompileError`` if this process has not created it."""
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    try:
        group = c10d._resolve_process_group(name)
    except (RuntimeError, ValueError) as error:
        raise CompileError(
            f"process group {name!r} does not exist: create it before building graphs"
        ) from error
    return tuple(dist.get_process_group_ranks(group))
