# SPDX-License-Identifier: Apache-2.0
"""The state rows of requests whose logits are edited: tensors on the device, written a row at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neuron_core.logit_edits import state_specs
from neuron_core.token_mask import mask_shape

__all__ = ["RowEdits", "SamplingState"]


@dataclass(frozen=True)
class RowEdits:
    """The edits of one request, and what its state row starts from."""

    repetition_penalty: float = 1.0
    """Logits of tokens of the prompt and of drawn ones are divided by it if positive, and multiplied if not."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that was drawn."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it was drawn."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to logits, by token id."""
    banned: Sequence[int] = ()
    """Tokens that are never drawn."""
    allowed: Sequence[int] = ()
    """If there are any, no other token is drawn."""
    stop_tokens: Sequence[int] = ()
    """Tokens that are not drawn in steps that say so, unless nothing else is left. Ids that the vocabulary lacks are
    never drawn anyway, and may be among them."""
    prompt_tokens: Sequence[int] = ()
    """For the repetition penalty; each may be there more than once."""
    output_tokens: Sequence[int] = ()
    """What was drawn before the row was written."""


class SamplingState:
    """``num_rows`` state rows of a vocabulary of ``vocab_size`` tokens; the tensors of `neuron_core.logit_edits`."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.tensors: dict[str, Tensor] = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in state_specs(num_rows, vocab_size).items()
        }

    def write(self, row: int, edits: RowEdits) -> None:
        """Make ``row`` that of a request with ``edits``; raises ``ValueError`` for a token outside the vocabulary."""
        penalties = (edits.repetition_penalty, edits.presence_penalty, edits.frequency_penalty)
        values = (
            torch.tensor(penalties),
            self._bias(edits),
            self._bits(edits.prompt_tokens),
            self._bits([token for token in edits.stop_tokens if 0 <= token < self.vocab_size]),
            torch.bincount(self._ids(edits.output_tokens), minlength=self.vocab_size).to(torch.int32),
        )
        for tensor, value in zip(self.tensors.values(), values, strict=True):
            tensor[row].copy_(value)

    def _bias(self, edits: RowEdits) -> Tensor:
        bias = torch.zeros(self.vocab_size)
        if edits.allowed:
            bias.fill_(float("-inf"))
            bias[self._ids(edits.allowed)] = 0.0
        bias[self._ids(list(edits.bias))] += torch.tensor(list(edits.bias.values()), dtype=torch.float32)
        bias[self._ids(edits.banned)] = float("-inf")
        return bias

    def _bits(self, token_ids: Sequence[int]) -> Tensor:
        ids = self._ids(token_ids).unique()
        words = torch.zeros(mask_shape(1, self.vocab_size)[1], dtype=torch.int64)
        words.index_put_((ids // 32,), 1 << (ids % 32), accumulate=True)
        return words.to(torch.int32)  # keeps the lower 32 bits, the sign among them

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(
                f"a token to edit is outside the vocabulary of {self.vocab_size}: {ids.tolist()[:8]}"
            )
        return ids
