# SPDX-License-Identifier: Apache-2.0
"""The programs a model's engine needs, and their inputs: one list for serving and for compiling ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuron_core.graphs.buckets import Bucket, BucketPlan, Phase
from neuron_core.graphs.build import Specs
from neuron_core.graphs.program import Program, TensorSpec
from neuron_core.kv.layout import KVLayout
from neuron_core.logit_edits import edit_specs, no_edits, state_specs
from neuron_core.prompt_embeds import only_tokens, prompt_embed_specs
from neuron_core.protocols import StaticModel
from neuron_core.step import StepInput
from neuron_core.token_mask import ALLOWED_TOKENS, allow_everything, mask_shape

__all__ = ["HIDDEN_STATES", "ModelPrograms", "variants"]

HIDDEN_STATES = "hidden_states"


def variants(bucket: Bucket) -> tuple[str, ...]:
    """The programs of a bucket: tokens alone and tokens with logits, logits of given hidden states, or hidden states
    alone.
    """
    alone = {Phase.LOGITS: ("logits",), Phase.EMBED: ("hidden",)}
    return alone.get(bucket.phase, ("greedy", "sample"))


@dataclass(frozen=True)
class ModelPrograms:
    """A model under a bucket plan, with a KV cache of ``num_blocks`` blocks per layer."""

    model: StaticModel
    plan: BucketPlan
    num_blocks: int

    def wanted(self) -> tuple[tuple[Bucket, str], ...]:
        """Every bucket and variant, the longest first."""
        return tuple((bucket, variant) for bucket in self.plan.all() for variant in variants(bucket))

    def program(self, bucket: Bucket, variant: str) -> Program:
        """The model's program."""
        return self.model.program(bucket, variant)

    def specs(self, bucket: Bucket) -> Specs:
        """Every input of the bucket's programs."""
        if bucket.phase is Phase.LOGITS:
            return {HIDDEN_STATES: ((bucket.num_tokens, self.model.hidden_size), self.model.dtype)}
        kv = {f"kv.{index}": self._kv(layout) for index, layout in enumerate(self.model.kv_layouts)}
        step = StepInput.specs(bucket, self.plan.block_size)
        if bucket.phase is Phase.EMBED:
            return {**step, **kv}
        mask = {ALLOWED_TOKENS: (mask_shape(bucket.num_seqs, self.model.vocab_size), torch.int32)}
        state = state_specs(self.plan.max_num_seqs, self.model.vocab_size)
        embeds = prompt_embed_specs(bucket.num_tokens, self.model)
        return {**step, **mask, **edit_specs(bucket.num_seqs), **state, **embeds, **kv}

    def padding(self, bucket: Bucket, rank: int = 0) -> dict[str, torch.Tensor]:
        """Every input but the cache and the sampling state, for a step without a token."""
        if bucket.phase is Phase.LOGITS:
            return {
                HIDDEN_STATES: torch.zeros(bucket.num_tokens, self.model.hidden_size, dtype=self.model.dtype)
            }
        step = StepInput.padding(bucket, self.plan.block_size, rank).as_values()
        if bucket.phase is Phase.EMBED:
            return step
        mask = {ALLOWED_TOKENS: allow_everything(bucket.num_seqs, self.model.vocab_size)}
        return {**step, **mask, **no_edits(bucket.num_seqs), **only_tokens(bucket.num_tokens, self.model)}

    def _kv(self, layout: KVLayout) -> TensorSpec:
        return TensorSpec.contiguous(layout.shape(self.num_blocks), layout.dtype)
