# SPDX-License-Identifier: Apache-2.0
"""The spans of all ranks cover each checkpoint tensor, evenly and in order."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from neuron_parallel import (
    ParallelGroup,
    QKVParallelLinear,
    Shard,
    ShardBlock,
    VocabParallelEmbedding,
    shard_of,
)


@given(parts=st.integers(1, 8), replicas=st.integers(1, 4), local=st.integers(1, 5), short=st.integers(0, 9))
def test_spans_cover_the_tensor_and_replicas_hold_the_same(parts, replicas, local, short):
    world, padded = parts * replicas, parts * local
    size = max(1, padded - short)
    block = ShardBlock("", size, parts, padded)
    spans = [block.span(rank, world) for rank in range(world)]
    assert block.local_size == local
    for part in range(parts):
        assert len(set(spans[part * replicas : (part + 1) * replicas])) == 1
    covered = [row for start, stop in spans[::replicas] for row in range(start, stop)]
    assert covered == list(range(size))
    assert all(stop - start <= local for start, stop in spans)


def test_layers_describe_their_weights():
    group = ParallelGroup("tp", 4)
    qkv = QKVParallelLinear(32, num_heads=8, num_kv_heads=2, head_dim=4, group=group, dtype=torch.float32)
    blocks = (ShardBlock("q_proj", 32, 4), ShardBlock("k_proj", 8, 2), ShardBlock("v_proj", 8, 2))
    assert shard_of(qkv.weight) == Shard(0, blocks)
    assert qkv.weight.shape == (8 + 4 + 4, 32)
    embedding = VocabParallelEmbedding(10, 4, group, dtype=torch.float32)
    assert embedding.weight.shape == (3, 4)
    assert [shard_of(embedding.weight).blocks[0].span(rank, 4) for rank in range(4)] == [
        (0, 3),
        (3, 6),
        (6, 9),
        (9, 10),
    ]


def test_a_plain_parameter_is_held_whole():
    assert shard_of(nn.Parameter(torch.zeros(5, 2))) == Shard(0, (ShardBlock("", 5, 1),))
