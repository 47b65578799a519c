# SPDX-License-Identifier: Apache-2.0
"""BERT as an encoder of texts, in single-device reading order; module names are those of a checkpoint.

Devlin et al. 2019, *BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding*.
"""

from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from neuron_core import ops
from neuron_core.errors import ConfigError
from neuron_core.graphs.buckets import Bucket
from neuron_core.graphs.model_programs import HIDDEN_STATES
from neuron_core.graphs.program import Part, Program
from neuron_core.kv.layout import KVLayout
from neuron_models.bert.config import RULES, BertSpec
from neuron_models.pooling_program import require_hidden, split_types
from neuron_parallel import (
    ColumnParallelLinear,
    ParallelGroup,
    ParallelGroups,
    ParallelPlan,
    RowParallelLinear,
    ShardBlock,
    VocabParallelEmbedding,
    replicated_parameter,
)


class LayerNorm(nn.Module):
    """Layer norm of the last dim, in float32 with one rounding at the end."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = replicated_parameter((size,), dtype)
        self.bias = replicated_parameter((size,), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, hidden]`` in its own dtype."""
        shape = self.weight.shape
        normed = F.layer_norm(x.float(), shape, self.weight.float(), self.bias.float(), self.eps)
        return normed.to(x.dtype)


class EmbeddingTable(nn.Module):
    """A small table that every rank holds."""

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = replicated_parameter((rows, hidden_size), dtype)


class BertEmbeddings(nn.Module):
    """Words, positions and token types, summed and normed."""

    def __init__(self, spec: BertSpec, group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, group, dtype=dtype)
        self.position_embeddings = EmbeddingTable(spec.num_positions, spec.hidden_size, dtype)
        self.token_type_embeddings = EmbeddingTable(spec.num_token_types, spec.hidden_size, dtype)
        self.LayerNorm = LayerNorm(spec.hidden_size, spec.layer_norm_eps, dtype)

    def forward(self, token_ids: Tensor, positions: Tensor, rank: Tensor) -> Tensor:
        """``hidden [T, hidden]``; ``token_ids [T]`` carry their types, see `split_types`."""
        ids, types = split_types(token_ids)
        words = self.word_embeddings(ids, rank)
        places = ops.embedding(positions, self.position_embeddings.weight)
        segments = ops.embedding(types, self.token_type_embeddings.weight)
        normed: Tensor = self.LayerNorm(words + places + segments)
        return normed


class BertSelfAttention(nn.Module):
    """Every token attends to every token of its text; nothing is kept for a later step."""

    def __init__(self, spec: BertSpec, group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        blocks = [ShardBlock(name, spec.hidden_size, group.size) for name in ("query", "key", "value")]
        self.qkv = ColumnParallelLinear(spec.hidden_size, blocks, group, bias=True, dtype=dtype)

    def forward(self, x: Tensor, request_rows: Tensor) -> Tensor:
        """``x [T, hidden]``, ``request_rows [T]`` int32 -> ``[T, hidden / ranks]``."""
        query, key, value = self.qkv(x).view(len(x), 3, -1, self.head_dim).unbind(1)
        return ops.encoder_attention(query, key, value, request_rows, scale=self.head_dim**-0.5).flatten(1)


class ResidualNorm(nn.Module):
    """A projection whose result is added to the residual, and the norm of the sum."""

    def __init__(self, in_features: int, spec: BertSpec, group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.dense = RowParallelLinear(in_features, spec.hidden_size, group, bias=True, dtype=dtype)
        self.LayerNorm = LayerNorm(spec.hidden_size, spec.layer_norm_eps, dtype)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """``x [T, in / ranks]``, ``residual [T, hidden]`` -> ``[T, hidden]``."""
        normed: Tensor = self.LayerNorm(self.dense(x) + residual)
        return normed


class BertAttention(nn.Module):
    """Attention of one layer."""

    def __init__(self, spec: BertSpec, group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.self = BertSelfAttention(spec, group, dtype)
        self.output = ResidualNorm(spec.hidden_size, spec, group, dtype)


class BertIntermediate(nn.Module):
    """The widening half of the MLP."""

    def __init__(self, spec: BertSpec, group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__()
        block = ShardBlock("", spec.intermediate_size, group.size)
        self.dense = ColumnParallelLinear(spec.hidden_size, [block], group, bias=True, dtype=dtype)


class BertLayer(nn.Module):
    """Attention and MLP, each followed by the norm of its sum with what it was given."""

    def __init__(self, spec: BertSpec, group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention = BertAttention(spec, group, dtype)
        self.intermediate = BertIntermediate(spec, group, dtype)
        self.output = ResidualNorm(spec.intermediate_size, spec, group, dtype)

    def forward(self, hidden: Tensor, request_rows: Tensor) -> Tensor:
        """``hidden [T, hidden]`` of the next layer."""
        x = self.attention.output(self.attention.self(hidden, request_rows), hidden)
        y: Tensor = self.output(F.gelu(self.intermediate.dense(x)), x)
        return y


class BertEncoder(nn.Module):
    """The layers."""

    def __init__(self, spec: BertSpec, group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(spec, group, dtype) for _ in range(spec.num_layers))


class Encoder(nn.Module):
    """What encoders are to an engine, whatever their head: made of a config, and without a cache."""

    kv_layouts: tuple[KVLayout, ...] = ()

    def __init__(self, config: PretrainedConfig, groups: ParallelGroups, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

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
        """The model of a checked config with unfilled weights; ``block_size`` and ``kv_dtype`` are of no cache."""
        return cls(config, groups, dtype)


class BertModel(Encoder):
    """The encoder as one program per bucket; it has no cache, so a text is computed in one step."""

    derived_tensors: ClassVar[tuple[str, ...]] = (
        "embeddings.position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
    )
    """Endings of checkpoint names that are not read: the numbers 0, 1, 2, … and a layer that embedding leaves out."""

    def __init__(self, config: PretrainedConfig, groups: ParallelGroups, dtype: torch.dtype) -> None:
        super().__init__(config, groups, dtype)
        spec = BertSpec.from_config(config)
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self.embeddings = BertEmbeddings(spec, groups.tp, dtype)
        self.encoder = BertEncoder(spec, groups.tp, dtype)

    @classmethod
    def check(cls, config: PretrainedConfig, plan: ParallelPlan) -> None:
        """Raise `ConfigError` naming a field that is not implemented, or a degree that does not divide the
        model.
        """
        RULES.check(config)
        spec = BertSpec.from_config(config)
        if spec.hidden_size % spec.num_heads:
            raise ConfigError(
                "hidden_size", spec.hidden_size, f"must be a multiple of {spec.num_heads} heads"
            )
        plan.check_model(
            num_heads=spec.num_heads, num_kv_heads=spec.num_heads, intermediate_size=spec.intermediate_size
        )

    def program(self, bucket: Bucket, variant: str) -> Program:
        """Token ids to ``hidden_states``; raises `ConfigError` for any variant but ``hidden``."""
        require_hidden(bucket, variant)
        embed = Part("embed", self.embeddings, ("token_ids", "positions", "rank"), (HIDDEN_STATES,))
        layers = [
            Part(f"layer.{i}", layer, (HIDDEN_STATES, "request_rows"), (HIDDEN_STATES,))
            for i, layer in enumerate(self.encoder.layer)
        ]
        return Program((embed, *layers), (HIDDEN_STATES,))
