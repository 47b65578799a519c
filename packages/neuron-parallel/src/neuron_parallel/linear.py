# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weight is split over a tensor-parallel group.

With ``sequence_parallel`` the tokens between blocks are split over the group too: a column-parallel layer
gathers them first and a row-parallel layer scatters its sum, instead of one all-reduce after the row-parallel
layer.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from neuron_core import ops
from neuron_parallel.collectives import all_gather, all_reduce, reduce_scatter
from neuron_parallel.group import ParallelGroup
from neuron_parallel.shard import Shard, ShardBlock, replicated_parameter, sharded_parameter


class ColumnParallelLinear(nn.Module):
    """``x [T, in] -> [T, out / size]``: the output features are split, blocks side by side in one weight.

    ``weight`` is ``[out_features, in_features]`` of this rank until a device packs it.
    """

    packable = True
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        blocks: Sequence[ShardBlock],
        group: ParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        shard = Shard(0, self.blocks)
        self.in_features = in_features
        self.out_features = shard.local_size
        self.group = group
        self.weight = sharded_parameter((self.out_features, in_features), shard, dtype)
        self.register_parameter(
            "bias", sharded_parameter((self.out_features,), shard, dtype) if bias else None
        )

    def forward(self, x: Tensor, sequence_parallel: bool = False) -> Tensor:
        """``x`` is ``[T, in]``, or ``[T / size, in]`` with ``sequence_parallel``; the result always has T
        rows.
        """
        if sequence_parallel:
            x = all_gather(x, self.group)
        y = ops.linear(x, self.weight)
        return y if self.bias is None else y + self.bias


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input as one weight, each split on its own: ``gate_proj``,
    ``up_proj``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        group: ParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype,
    ) -> None:
        blocks = [ShardBlock(name, size, group.size) for name, size in out_features.items()]
        super().__init__(in_features, blocks, group, bias=bias, dtype=dtype)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one weight, split by heads; KV heads replicate beyond their
    number.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: ParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype,
    ) -> None:
        kv_parts = min(group.size, num_kv_heads)
        blocks = (
            ShardBlock("q_proj", num_heads * head_dim, group.size),
            ShardBlock("k_proj", num_kv_heads * head_dim, kv_parts),
            ShardBlock("v_proj", num_kv_heads * head_dim, kv_parts),
        )
        super().__init__(in_features, blocks, group, bias=bias, dtype=dtype)
        self.head_dim = head_dim
        self.num_heads = num_heads // group.size
        self.num_kv_heads = num_kv_heads // kv_parts

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the layer's result ``[T, out]``: query ``[T, heads, D]``, key and value ``[T, kv_heads,
        D]``.
        """
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        query, key, value = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return query, key, value


class RowParallelLinear(nn.Module):
    """``x [T, in / size] -> [T, out]``: the input features are split and the partial results summed over the
    group.
    """

    packable = True
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        shard = Shard(1, (ShardBlock("", in_features, group.size),))
        self.in_features = shard.local_size
        self.out_features = out_features
        self.group = group
        self.weight = sharded_parameter((out_features, self.in_features), shard, dtype)
        self.register_parameter("bias", replicated_parameter((out_features,), dtype) if bias else None)

    def forward(self, x: Tensor, sequence_parallel: bool = False) -> Tensor:
        """``x`` is ``[T, in / size]``; the result has T rows, or this rank's ``T / size`` with
        ``sequence_parallel``.
        """
        partial = ops.linear(x, self.weight)
        y = reduce_scatter(partial, self.group) if sequence_parallel else all_reduce(partial, self.group)
        return y if self.bias is None else y + self.bias
