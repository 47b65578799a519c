# SPDX-License-Identifier: Apache-2.0
"""Token embedding and language-model head, split by vocabulary."""

import torch
from torch import Tensor, nn

from neuron_core import ops
from neuron_parallel.collectives import all_gather, all_reduce, reduce_scatter
from neuron_parallel.group import ParallelGroup
from neuron_parallel.shard import Shard, ShardBlock, sharded_parameter


def vocab_shard(vocab_size: int, group: ParallelGroup) -> Shard:
    """Equal rows of the vocabulary per rank, padded with zeros where it does not divide."""
    padded = -(-vocab_size // group.size) * group.size
    return Shard(0, (ShardBlock("", vocab_size, group.size, padded),))


class VocabParallelEmbedding(nn.Module):
    """``token_ids int32 [T] -> [T, hidden]``; each rank looks up the ids of its own rows and the results are
    summed.

    It is ``packable`` only while a head shares its weight: alone it is only ever read by rows.
    """

    packable = False

    def __init__(
        self, vocab_size: int, hidden_size: int, group: ParallelGroup, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        shard = vocab_shard(vocab_size, group)
        self.local_vocab_size = shard.local_size
        self.group = group
        self.weight = sharded_parameter((shard.local_size, hidden_size), shard, dtype)

    def forward(self, token_ids: Tensor, rank: Tensor, sequence_parallel: bool = False) -> Tensor:
        """``rank`` is int32 ``[1]``. The result has T rows, or this rank's ``T / size`` with
        ``sequence_parallel``.
        """
        if self.group.size == 1:
            return ops.embedding(token_ids, self.weight)
        local_ids = token_ids - rank * self.local_vocab_size
        is_local = (local_ids >= 0) & (local_ids < self.local_vocab_size)
        rows = ops.embedding(torch.where(is_local, local_ids, 0), self.weight)
        partial = torch.where(is_local.unsqueeze(-1), rows, 0)
        return reduce_scatter(partial, self.group) if sequence_parallel else all_reduce(partial, self.group)


class ParallelLMHead(nn.Module):
    """Hidden states to logits over the vocabulary; each rank multiplies its own rows.

    Give ``tied_to`` to share the embedding's weight; a device that packs it packs it for both.
    """

    packable = True

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: ParallelGroup,
        *,
        dtype: torch.dtype,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        shard = vocab_shard(vocab_size, group)
        self.vocab_size = vocab_size
        self.in_features = hidden_size
        self.out_features = shard.local_size
        self.group = group
        if tied_to is None:
            self.weight = sharded_parameter((shard.local_size, hidden_size), shard, dtype)
        else:
            self.weight = tied_to.weight
            tied_to.packable = True

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden [R, hidden_size]`` to float32 logits ``[R, vocab_size]``, gathered on every rank."""
        logits = all_gather(self._local_logits(hidden), self.group, dim=1)
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size].contiguous()

    def greedy(self, hidden: Tensor, rank: Tensor) -> Tensor:
        """The most likely token of each row, int32 ``[R]``, the first one of equals.

        Each rank contributes its best value and token, so two numbers per row and rank are gathered, not
        logits.
        """
        logits = self._local_logits(hidden)
        if self.group.size == 1:
            return ops.greedy(logits)
        tokens = torch.arange(self.out_features, device=logits.device) + rank * self.out_features
        values, indices = torch.where(tokens < self.vocab_size, logits, float("-inf")).max(dim=1)
        # A vocabulary has fewer than 2^24 tokens, so a token is exact as float32 and travels with its value.
        best = torch.stack((values, tokens[indices].to(torch.float32)), dim=1)
        candidates = all_gather(best.unsqueeze(1), self.group, dim=1)
        winner = candidates[..., 0].argmax(dim=1, keepdim=True)
        return candidates[..., 1].gather(1, winner).squeeze(1).to(torch.int32)

    def _local_logits(self, hidden: Tensor) -> Tensor:
        return ops.linear(hidden, self.weight, wide=True)
