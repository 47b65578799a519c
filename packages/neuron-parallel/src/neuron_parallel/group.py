# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks that collectives run in, named so that every rank compiles the same graph."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch._C._distributed_c10d import (
    ProcessGroup,
    _register_process_group,
    _resolve_process_group,
)

from neuron_core.errors import ConfigError
from neuron_parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

TENSOR_PARALLEL = "neuron.tp"


@dataclass(frozen=True)
class ParallelGroup:
    """Ranks a collective spans: the name torch resolves at run time, and how many there are.

    It says nothing about *which* rank this process is, so it can be a constant of a graph that all ranks
    share; where arithmetic needs the rank it is an int32 ``[1]`` tensor input. In a group of one every
    collective is a no-op and leaves no node in a graph.
    """

    name: str
    size: int

    def rank(self) -> int:
        """This process's rank within the group, for loading weights and filling the ``rank`` input."""
        return 0 if self.size == 1 else _resolve_process_group(cast("GroupName", self.name)).rank()


@dataclass(frozen=True)
class ParallelGroups:
    """The plan of one server and the groups made for it."""

    plan: ParallelPlan
    tp: ParallelGroup

    @classmethod
    def single(cls) -> "ParallelGroups":
        """The groups of a model that lives on one rank; torch.distributed is not needed."""
        return cls(ParallelPlan(), ParallelGroup(TENSOR_PARALLEL, 1))

    @classmethod
    def describe(cls, plan: ParallelPlan) -> "ParallelGroups":
        """The groups of ``plan`` by name and size only: enough to capture a graph where no peer runs."""
        return cls(plan, ParallelGroup(TENSOR_PARALLEL, plan.tensor_parallel_size))

    @classmethod
    def create(cls, plan: ParallelPlan) -> "ParallelGroups":
        """Make the groups of ``plan`` over the initialised torch.distributed world; every rank must call
        this.

        Neighbouring ranks form a tensor-parallel group. A second call with the same plan returns the groups
        that exist. Raises `ConfigError` if the world is missing, or is not whole groups.
        """
        groups = cls.describe(plan)
        if plan.tensor_parallel_size > 1:
            _create_once(groups.tp)
        return groups


def _create_once(group: ParallelGroup) -> None:
    if not dist.is_initialized():
        raise ConfigError(
            "tensor_parallel_size", group.size, "needs torch.distributed to be initialised; use 1 without it"
        )
    world = dist.get_world_size()
    if world % group.size:
        raise ConfigError(
            "tensor_parallel_size", group.size, f"does not divide the world of {world} ranks; use {world}"
        )
    existing = _registered(group.name)
    if existing is not None:
        if existing.size() != group.size:
            raise ConfigError(
                "tensor_parallel_size",
                group.size,
                f"a group of {existing.size()} was made before; use {existing.size()}",
            )
        return
    for first in range(0, world, group.size):
        ranks = list(range(first, first + group.size))
        members = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            # torch names a group by how many were made before it, which differs between replicas and
            # programs; the name is a constant of every graph, so ours must not.
            _register_process_group(cast("GroupName", group.name), members)


def _registered(name: str) -> ProcessGroup | None:
    try:
        return _resolve_process_group(cast("GroupName", name))
    except RuntimeError:
        return None
