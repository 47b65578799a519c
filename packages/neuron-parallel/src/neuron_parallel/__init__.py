# SPDX-License-Identifier: Apache-2.0
"""Sharded layers and functional collectives over torch.distributed."""

from neuron_parallel.collectives import all_gather, all_reduce, reduce_scatter
from neuron_parallel.group import ParallelGroup, ParallelGroups
from neuron_parallel.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from neuron_parallel.plan import ParallelPlan
from neuron_parallel.shard import Shard, ShardBlock, replicated_parameter, shard_of, sharded_parameter
from neuron_parallel.vocab import ParallelLMHead, VocabParallelEmbedding

__all__ = [
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "ParallelGroup",
    "ParallelGroups",
    "ParallelLMHead",
    "ParallelPlan",
    "QKVParallelLinear",
    "RowParallelLinear",
    "Shard",
    "ShardBlock",
    "VocabParallelEmbedding",
    "__version__",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "replicated_parameter",
    "shard_of",
    "sharded_parameter",
]

__version__ = "0.1.0"
