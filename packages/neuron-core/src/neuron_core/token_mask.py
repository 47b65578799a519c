# SPDX-License-Identifier: Apache-2.0
"""Which tokens a step may draw: one bit per token, an input of every graph that samples.

It is always there, so that the first request with a grammar compiles nothing. The layout is that of the grammar
libraries: int32 ``[rows, ceil(V / 32)]``, bit ``i % 32`` of word ``i // 32`` for token ``i``, the lowest bit first.
"""

from __future__ import annotations

import torch

__all__ = ["ALLOWED_TOKENS", "allow_everything", "mask_shape"]

ALLOWED_TOKENS = "allowed_tokens"
"""Name of the mask among a program's inputs."""


def mask_shape(num_seqs: int, vocab_size: int) -> tuple[int, int]:
    """Shape of the mask of ``num_seqs`` rows."""
    return num_seqs, -(-vocab_size // 32)


def allow_everything(num_seqs: int, vocab_size: int) -> torch.Tensor:
    """A mask that bans nothing."""
    return torch.full(mask_shape(num_seqs, vocab_size), -1, dtype=torch.int32)
