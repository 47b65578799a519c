# SPDX-License-Identifier: Apache-2.0
"""Which collectives a captured graph of sharded layers holds; none in a group of one. Needs no peer."""

import pytest
import torch
from torch import nn

from neuron_core.graphs.capture import capture
from neuron_core.graphs.program import Part, TensorSpec
from neuron_parallel import (
    MergedColumnParallelLinear,
    ParallelGroup,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
    all_gather,
    all_reduce,
    reduce_scatter,
)

PAIR = ParallelGroup("traced", 2)
ALONE = ParallelGroup("alone", 1)


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        halves = {"gate_proj": 4, "up_proj": 4}
        self.up = MergedColumnParallelLinear(8, halves, group, dtype=torch.float32)
        self.down = RowParallelLinear(8, 8, group, dtype=torch.float32)

    def forward(self, x, sequence_parallel):
        return self.down(self.up(x, sequence_parallel), sequence_parallel)


class Greedy(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden, rank):
        return self.head.greedy(hidden, rank)


def captured(module, *inputs, **static):
    """The collectives a captured graph of `module` holds, and the shape of its result."""
    names = tuple(f"x{i}" for i in range(len(inputs)))
    part = Part("part", module, names, ("y",), tuple(static.items()))
    graph = capture(part, tuple(TensorSpec.of(x) for x in inputs), torch.device("cpu"))
    nodes = [node for node in graph.module.graph.nodes if "_c10d" in str(node.target)]
    collectives = [node for node in nodes if "wait_tensor" not in str(node.target)]
    return collectives, graph.output_specs()[0].shape


def traced(module, *inputs, **static):
    nodes, shape = captured(module, *inputs, **static)
    return [node.target._schema.name.split("::")[1] for node in nodes], shape


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_group_of_one_leaves_no_collective(sequence_parallel):
    assert traced(Block(ALONE), torch.zeros(6, 8), sequence_parallel=sequence_parallel) == ([], (6, 8))
    for collective in (all_reduce, all_gather, reduce_scatter):
        x = torch.zeros(3, 2)
        assert collective(x, ALONE) is x


def test_decode_all_reduces_once_per_block():
    assert traced(Block(PAIR), torch.zeros(6, 8), sequence_parallel=False) == (["all_reduce"], (6, 8))


def test_sequence_parallel_prefill_gathers_and_scatters_tokens():
    names, shape = traced(Block(PAIR), torch.zeros(3, 8), sequence_parallel=True)
    assert (names, shape) == (["all_gather_into_tensor", "reduce_scatter_tensor"], (3, 8))


@pytest.mark.parametrize(
    ("sequence_parallel", "name", "rows"), [(False, "all_reduce", 6), (True, "reduce_scatter_tensor", 3)]
)
def test_embedding_sums_or_scatters_partial_lookups(sequence_parallel, name, rows):
    embedding = VocabParallelEmbedding(10, 8, PAIR, dtype=torch.float32)
    ids, rank = torch.zeros(6, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    names, shape = traced(embedding, ids, rank, sequence_parallel=sequence_parallel)
    assert (names, shape) == ([name], (rows, 8))


def test_greedy_gathers_two_numbers_per_row_and_not_the_vocabulary():
    head = ParallelLMHead(10, 8, PAIR, dtype=torch.float32)
    nodes, shape = captured(Greedy(head), torch.zeros(6, 8), torch.zeros(1, dtype=torch.int32))
    assert [tuple(node.args[0].meta["val"].shape) for node in nodes] == [(6, 1, 2)]
    assert shape == (6,)


def test_an_extent_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="extent 5 of dim 0 does not divide over 2 ranks"):
        reduce_scatter(torch.zeros(5, 2), PAIR)
