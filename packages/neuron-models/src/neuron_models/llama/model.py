# SPDX-License-Identifier: Apache-2.0
"""Llama, in single-device reading order; the sharded layers carry the parallelism.

Grattafiori et al. 2024, *The Llama 3 Herd of Models*.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from neuron_core import ops
from neuron_core.graphs.buckets import Bucket
from neuron_core.graphs.program import Program
from neuron_core.kv.layout import KVLayout
from neuron_models.attention import PagedAttention
from neuron_models.config import ConfigRules
from neuron_models.kv_scales import SCALE_NAMES
from neuron_models.layers import GatedMLP, PagedContext, RMSNorm
from neuron_models.llama.config import RULES, LlamaSpec
from neuron_models.program import EmbeddingPart, MixedEmbeddingPart, decoder_program
from neuron_models.rope import RotaryTable, check_rope
from neuron_parallel import (
    ParallelGroup,
    ParallelGroups,
    ParallelLMHead,
    ParallelPlan,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)


class LlamaAttention(nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(
        self, spec: LlamaSpec, group: ParallelGroup, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.attn = PagedAttention(spec.head_dim, spec.num_kv_heads, group, dtype, kv_dtype)
        self.qkv_proj = QKVParallelLinear(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            group,
            bias=spec.attention_bias,
            dtype=dtype,
        )
        self.o_proj = RowParallelLinear(
            spec.num_heads * spec.head_dim, spec.hidden_size, group, bias=spec.attention_bias, dtype=dtype
        )

    def forward(self, x: Tensor, step: PagedContext, sequence_parallel: bool) -> Tensor:
        """``x [T, hidden] -> [T, hidden]``; writes the step's keys and values to ``step.kv``."""
        query, key, value = self.project(x, sequence_parallel)
        query, key = ops.rotary(query, key, step.cos, step.sin)
        mixed = self.attn(query, key, value, step)
        y: Tensor = self.o_proj(mixed.flatten(1), sequence_parallel)
        return y

    def project(self, x: Tensor, sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Query ``[T, heads, head_dim]``, key and value ``[T, kv_heads, head_dim]`` before rotation."""
        return self.qkv_proj.split(self.qkv_proj(x, sequence_parallel))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm that first adds the previous block's result to the residual."""

    attention_class: ClassVar[type[LlamaAttention]] = LlamaAttention

    def __init__(
        self, spec: LlamaSpec, group: ParallelGroup, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.self_attn = self.attention_class(spec, group, dtype, kv_dtype)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, group, bias=spec.mlp_bias, dtype=dtype)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)

    def forward(
        self, hidden: Tensor, residual: Tensor, *context: Tensor, sequence_parallel: bool
    ) -> tuple[Tensor, Tensor]:
        """``(hidden, residual)`` of the next layer; ``context`` holds the fields of `PagedContext` in
        order.
        """
        x, residual = self.input_layernorm(hidden, residual)
        x = self.self_attn(x, PagedContext(*context), sequence_parallel)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x, sequence_parallel), residual


class LlamaModel(nn.Module):
    """Embedding, layers and final norm, under the names a checkpoint uses."""

    layer_class: ClassVar[type[LlamaDecoderLayer]] = LlamaDecoderLayer

    def __init__(
        self, spec: LlamaSpec, group: ParallelGroup, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, group, dtype=dtype)
        self.layers = nn.ModuleList(
            self.layer_class(spec, group, dtype, kv_dtype) for _ in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)


class LlamaForCausalLM(nn.Module):
    """The model as a program per bucket, and the layouts of the cache it needs."""

    rules: ClassVar[ConfigRules] = RULES
    model_class: ClassVar[type[LlamaModel]] = LlamaModel
    derived_tensors: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq", *SCALE_NAMES)
    """Endings of checkpoint names that are no weights: what older checkpoints store although the config determines
    it, and the scales of an FP8 cache, which `neuron_models.kv_scales` reads.
    """

    kv_layouts: tuple[KVLayout, ...]
    takes_prompt_embeds: bool = False
    """Whether the programs take embeddings beside token ids; set before the first is asked for."""

    def __init__(
        self,
        config: PretrainedConfig,
        groups: ParallelGroups,
        dtype: torch.dtype,
        block_size: int,
        kv_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        spec = LlamaSpec.from_config(config)
        self.vocab_size, self.hidden_size, self.dtype = spec.vocab_size, spec.hidden_size, dtype
        self.model = self.model_class(spec, groups.tp, dtype, kv_dtype)
        self.lm_head = ParallelLMHead(
            spec.vocab_size,
            spec.hidden_size,
            groups.tp,
            dtype=dtype,
            tied_to=self.model.embed_tokens if spec.tie_word_embeddings else None,
        )
        self.rotary = RotaryTable(config, spec.head_dim)
        kv_heads = max(1, spec.num_kv_heads // groups.tp.size)
        self.kv_layouts = (KVLayout(kv_heads, spec.head_dim, block_size, kv_dtype),) * spec.num_layers

    @classmethod
    def check(cls, config: PretrainedConfig, plan: ParallelPlan) -> None:
        """Raise `ConfigError` naming a field that is not implemented, or a degree that does not divide the
        model.
        """
        cls.rules.check(config)
        check_rope(config)
        spec = LlamaSpec.from_config(config)
        plan.check_model(
            num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, intermediate_size=spec.intermediate_size
        )

    @classmethod
    def from_config(
        cls,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        groups: ParallelGroups,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> Self:
        """The model of a checked config with unfilled weights."""
        return cls(config, groups, dtype, block_size, kv_dtype or dtype)

    def program(self, bucket: Bucket, variant: str) -> Program:
        """See `decoder_program`."""
        embedding = MixedEmbeddingPart if self.takes_prompt_embeds else EmbeddingPart
        return decoder_program(
            bucket,
            variant,
            embedding=embedding(self.model.embed_tokens, self.rotary),
            layers=self.model.layers,
            norm=self.model.norm,
            lm_head=self.lm_head,
        )
