# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_collectives.py: each checks itself against what a single process computes."""

import multiprocessing
import sys

import torch
import torch.distributed as dist

from neuron_core.errors import ConfigError
from neuron_parallel import (
    MergedColumnParallelLinear,
    ParallelGroups,
    ParallelLMHead,
    ParallelPlan,
    RowParallelLinear,
    VocabParallelEmbedding,
    all_gather,
    all_reduce,
    reduce_scatter,
    shard_of,
)


def fill(parameter, whole, rank, world):
    """Cut `whole` the way the parameter says; the checkpoint tensors lie one after the other in it."""
    shard = shard_of(parameter)
    offsets = torch.tensor([0, *(block.size for block in shard.blocks)]).cumsum(0).tolist()
    pieces = []
    for block, offset in zip(shard.blocks, offsets, strict=False):
        start, stop = block.span(rank, world)
        pieces.append(whole.narrow(shard.dim, offset + start, stop - start))
    filled = torch.cat(pieces, shard.dim)
    parameter.data.zero_()
    parameter.data.narrow(shard.dim, 0, filled.shape[shard.dim]).copy_(filled)


def check_collectives(group, rank, world, dtype):
    x = [torch.randn(4 * world, 2 * world, 3).to(dtype) for _ in range(world)]
    total = torch.stack(x).double().sum(0)
    torch.testing.assert_close(all_reduce(x[rank], group).double(), total, atol=0.05, rtol=0.02)
    for dim in (0, 1, -1):
        assert torch.equal(all_gather(x[rank], group, dim), torch.cat(x, dim))
    for dim in (0, 1):
        expected = total.chunk(world, dim)[rank]
        torch.testing.assert_close(
            reduce_scatter(x[rank], group, dim).double(), expected, atol=0.05, rtol=0.02
        )


def check_block(group, rank, world):
    up = MergedColumnParallelLinear(
        8, {"gate_proj": 12, "up_proj": 12}, group, bias=True, dtype=torch.float32
    )
    down = RowParallelLinear(12, 8, group, bias=True, dtype=torch.float32)
    up_weight, up_bias = torch.randn(24, 8), torch.randn(24)
    down_weight, down_bias = torch.randn(8, 12), torch.randn(8)
    for parameter, whole in (
        (up.weight, up_weight),
        (up.bias, up_bias),
        (down.weight, down_weight),
        (down.bias, down_bias),
    ):
        fill(parameter, whole, rank, world)
    x = torch.randn(4 * world, 8)
    gate, value = torch.nn.functional.linear(x, up_weight, up_bias).chunk(2, 1)
    expected = torch.nn.functional.linear(gate * value, down_weight, down_bias)

    def run(x, sequence_parallel):
        gate, value = up(x, sequence_parallel).chunk(2, 1)
        return down(gate * value, sequence_parallel)

    torch.testing.assert_close(run(x, False), expected, atol=1e-5, rtol=1e-5)
    mine = run(x.chunk(world)[rank], True)
    torch.testing.assert_close(mine, expected.chunk(world)[rank], atol=1e-5, rtol=1e-5)


def check_vocabulary(group, rank, world, vocab_size):
    table = torch.randn(vocab_size, 8)
    embedding = VocabParallelEmbedding(vocab_size, 8, group, dtype=torch.float32)
    head = ParallelLMHead(vocab_size, 8, group, dtype=torch.float32, tied_to=embedding)
    assert head.weight is embedding.weight
    fill(embedding.weight, table, rank, world)
    rank_input = torch.tensor([rank], dtype=torch.int32)
    ids = torch.randint(vocab_size, (4 * world,), dtype=torch.int32)
    ids[0], ids[1] = 0, vocab_size - 1
    assert torch.equal(embedding(ids, rank_input), table[ids])
    assert torch.equal(embedding(ids, rank_input, True), table[ids].chunk(world)[rank])
    hidden = torch.randn(5, 8)
    torch.testing.assert_close(head(hidden), hidden @ table.T, atol=1e-5, rtol=1e-5)
    assert head.greedy(hidden, rank_input).tolist() == (hidden @ table.T).argmax(1).tolist()
    # Equal values: the first token wins; all below zero: the zeros of padding must not win.
    fill(embedding.weight, torch.ones(vocab_size, 8), rank, world)
    assert head.greedy(torch.ones(2, 8), rank_input).tolist() == [0, 0]
    assert head.greedy(-torch.ones(2, 8), rank_input).tolist() == [0, 0]


def run_rank(rank: int, world: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    groups = ParallelGroups.create(ParallelPlan(world))
    assert ParallelGroups.create(ParallelPlan(world)) == groups
    assert groups.tp.rank() == rank
    for size, words in (
        (world + 1, f"does not divide the world of {world} ranks"),
        (world // 2, "was made before"),
    ):
        try:
            ParallelGroups.create(ParallelPlan(size))
        except ConfigError as error:
            assert words in str(error)
        else:
            assert size == 1
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        check_collectives(groups.tp, rank, world, dtype)
    check_block(groups.tp, rank, world)
    for vocab_size in (16, 13):
        check_vocabulary(groups.tp, rank, world, vocab_size)
    dist.destroy_process_group()


def main(world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, world, rendezvous)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
