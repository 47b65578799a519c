# SPDX-License-Identifier: Apache-2.0
"""Models that give hidden states and no token: encoders as they are, and decoders without their language-model head."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from neuron_core.errors import ConfigError
from neuron_core.graphs.buckets import Bucket, BucketPlan
from neuron_core.graphs.model_programs import HIDDEN_STATES
from neuron_core.graphs.program import Part, Program
from neuron_core.kv.layout import KVLayout
from neuron_core.protocols import StaticModel
from neuron_models.classification import HeadLinear, check_head, classifies
from neuron_models.llama.model import LlamaForCausalLM
from neuron_models.pooling_program import HIDDEN, HiddenHead, require_hidden
from neuron_models.program import EmbeddingPart, decoder_parts
from neuron_models.registry import build_model, check_model, resolve
from neuron_parallel import ParallelGroups, ParallelPlan

BIDIRECTIONAL = ("is_causal", False), ("use_bidirectional_attention", True)
"""Config fields of decoder checkpoints that were trained to see the whole text, and the value that says so."""


class EmbeddingDecoder(nn.Module):
    """A decoder without its language-model head.

    Its parameters have two names each, with ``model.`` and without, because checkpoints of embedding models are
    saved under either; a head that a checkpoint holds is not read.
    """

    kv_layouts: tuple[KVLayout, ...]
    derived_tensors: ClassVar[tuple[str, ...]] = (*LlamaForCausalLM.derived_tensors, "lm_head.weight")

    def __init__(self, causal: LlamaForCausalLM) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.dtype = causal.vocab_size, causal.hidden_size, causal.dtype
        self.kv_layouts = causal.kv_layouts
        self.group = causal.lm_head.group
        self.model = causal.model
        self.model.embed_tokens.packable = False  # no head shares its weight
        self.embed_tokens, self.layers, self.norm = (
            causal.model.embed_tokens,
            causal.model.layers,
            causal.model.norm,
        )
        self.rotary = causal.rotary

    def program(self, bucket: Bucket, variant: str) -> Program:
        """Token ids to ``hidden_states``; raises `ConfigError` for any variant but ``hidden``."""
        require_hidden(bucket, variant)
        static = (("sequence_parallel", self.group.size > 1),)
        parts = decoder_parts(EmbeddingPart(self.model.embed_tokens, self.rotary), self.model.layers, static)
        head = HiddenHead(self.model.norm, self.group)
        last = Part(HIDDEN, head, ("hidden", "residual"), (HIDDEN_STATES,), static)
        return Program((*parts, last), last.outputs)


class ClassifyingDecoder(EmbeddingDecoder):
    """A decoder with a classification head, which the host computes, in the place of its language-model head."""

    def __init__(self, causal: LlamaForCausalLM, num_labels: int) -> None:
        super().__init__(causal)
        self.score = HeadLinear(causal.hidden_size, num_labels, bias=False)

    def classify(self, pooled: Tensor) -> Tensor:
        """``pooled [texts, hidden]`` -> logits ``[texts, labels]`` float32."""
        logits: Tensor = self.score(pooled)
        return logits


def build_model_for(
    plan: BucketPlan,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    groups: ParallelGroups,
    kv_dtype: torch.dtype | None = None,
    prompt_embeds: bool = False,
) -> StaticModel:
    """`build_pooling_model` for a pooling plan, else `build_model`: the model whose buckets are those of ``plan``."""
    if plan.pooling:
        return build_pooling_model(
            config, dtype=dtype, groups=groups, block_size=plan.block_size, kv_dtype=kv_dtype
        )
    return build_model(
        config,
        dtype=dtype,
        groups=groups,
        block_size=plan.block_size,
        kv_dtype=kv_dtype,
        prompt_embeds=prompt_embeds,
    )


def check_pooling_model(config: PretrainedConfig, plan: ParallelPlan) -> None:
    """As `check_model`, for a server that embeds.

    Also raises `ConfigError` if it asks for a head that its checkpoint does not hold, or was trained to see whole texts
    with an architecture whose tokens see only what is before them.
    """
    check_model(config, plan)
    check_head(config)
    factory = resolve(config)
    if not (isinstance(factory, type) and issubclass(factory, LlamaForCausalLM)):
        return
    for name, value in BIDIRECTIONAL:
        if getattr(config, name, None) is value:
            hint = (
                f"attention over the whole text is not implemented for {config.model_type}; use {not value}"
            )
            raise ConfigError(name, value, hint)


def build_pooling_model(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    groups: ParallelGroups,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
) -> StaticModel:
    """As `build_model`, for a server that embeds; raises `ConfigError` if the architecture has no such form."""
    check_pooling_model(config, groups.plan)
    model = build_model(config, dtype=dtype, groups=groups, block_size=block_size, kv_dtype=kv_dtype)
    if isinstance(model, LlamaForCausalLM):
        return ClassifyingDecoder(model, config.num_labels) if classifies(config) else EmbeddingDecoder(model)
    if model.kv_layouts:
        hint = f"{type(model).__name__} cannot be served with --runner pooling; use --runner generate"
        raise ConfigError("architectures", config.architectures, hint)
    return model
