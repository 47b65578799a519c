# SPDX-License-Identifier: Apache-2.0
"""What the programs of pooling models share: their only variant, and the head that gives hidden states."""

import torch
from torch import Tensor, nn

from neuron_core.errors import ConfigError
from neuron_core.graphs.buckets import Bucket, Phase
from neuron_models.layers import RMSNorm
from neuron_parallel import ParallelGroup, all_gather

HIDDEN = "hidden"
"""The only variant of a pooling model's buckets: its output is ``hidden_states [T, hidden]``."""

TYPE_BIT = 30
"""The bit of a token id that is set in the second text of a pair, whose tokens are of type 1; as in vLLM's models."""


def split_types(token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and types of tokens, ``[T]`` each, of ids with ``TYPE_BIT``."""
    return torch.bitwise_and(token_ids, (1 << TYPE_BIT) - 1), torch.bitwise_right_shift(token_ids, TYPE_BIT)


class HiddenHead(nn.Module):
    """Last hidden states to those of all tokens, normed."""

    def __init__(self, norm: RMSNorm, group: ParallelGroup) -> None:
        super().__init__()
        self.norm = norm
        self.group = group

    def forward(self, hidden: Tensor, residual: Tensor, *, sequence_parallel: bool) -> Tensor:
        """``hidden_states [T, hidden]``."""
        normed, _ = self.norm(hidden, residual)
        return all_gather(normed, self.group) if sequence_parallel else normed


def require_hidden(bucket: Bucket, variant: str) -> None:
    """Raise `ConfigError` unless a pooling model has that variant of that bucket."""
    if bucket.phase is not Phase.EMBED or variant != HIDDEN:
        raise ConfigError("variant", variant, f"is none of a pooling model's {bucket.name}; use {HIDDEN!r}")
