# SPDX-License-Identifier: Apache-2.0
"""Teacher forcing: a logits processor that lets a request draw only the tokens it was given, one after the other."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["FORCED", "ForcedTokens"]

FORCED = "forced_tokens"
"""Key of ``SamplingParams.extra_args``: a list of token ids."""


class ForcedTokens(LogitsProcessor):
    """Leaves each request with forced tokens only the next of them; a request without any is left alone."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._forced: dict[int, tuple[list[int], list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ``ValueError`` for anything but a list of token ids, as many as the request may draw."""
        forced = (sampling_params.extra_args or {}).get(FORCED)
        if forced is None:
            return
        if not isinstance(forced, list) or not all(isinstance(t, int) and t >= 0 for t in forced):
            raise ValueError(f"{FORCED}={forced!r} must be a list of token ids; [1, 2] works")
        if sampling_params.max_tokens is None or sampling_params.max_tokens > len(forced):
            raise ValueError(
                f"{FORCED} has {len(forced)} tokens for max_tokens={sampling_params.max_tokens}; {len(forced)} works"
            )

    def is_argmax_invariant(self) -> bool:
        """It decides which token is likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests as they come, go and move."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._forced.pop(index, None)
        for index, params, _, drawn in batch_update.added:
            forced = (params.extra_args or {}).get(FORCED)
            self._forced.pop(index, None)
            if forced is not None:
                self._forced[index] = (forced, drawn)
        for source, target, how in batch_update.moved:
            moved, replaced = self._forced.pop(source, None), self._forced.pop(target, None)
            if moved is not None:
                self._forced[target] = moved
            if how is MoveDirectionality.SWAP and replaced is not None:
                self._forced[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits [R, V]`` with every token but the forced one at minus infinity."""
        for index, (forced, drawn) in self._forced.items():
            if len(drawn) < len(forced):
                token = forced[len(drawn)]
                kept = logits[index, token].clone()
                logits[index].fill_(float("-inf"))
                logits[index, token] = kept.nan_to_num(
                    0.0
                )  # what was not finite is reported from the raw logits
        return logits
