# SPDX-License-Identifier: Apache-2.0
"""Qwen3 dense: Llama with a norm on every query and key head.

Yang et al. 2025, *Qwen3 Technical Report*.
"""

from typing import ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from neuron_models.config import ConfigRules
from neuron_models.layers import RMSNorm
from neuron_models.llama.config import LlamaSpec
from neuron_models.llama.model import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from neuron_models.qwen3.config import RULES, check_layer_types
from neuron_parallel import ParallelGroup, ParallelPlan


class Qwen3Attention(LlamaAttention):
    """Grouped-query attention whose query and key heads are normalised before rotation."""

    def __init__(
        self, spec: LlamaSpec, group: ParallelGroup, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(spec, group, dtype, kv_dtype)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype)

    def project(self, x: Tensor, sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Query ``[T, heads, head_dim]``, key and value ``[T, kv_heads, head_dim]`` before rotation."""
        query, key, value = super().project(x, sequence_parallel)
        return self.q_norm(query), self.k_norm(key), value


class Qwen3DecoderLayer(LlamaDecoderLayer):
    """A Llama layer with Qwen3's attention."""

    attention_class = Qwen3Attention


class Qwen3Model(LlamaModel):
    """Embedding, layers and final norm, under the names a checkpoint uses."""

    layer_class = Qwen3DecoderLayer


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The model as a program per bucket, and the layouts of the cache it needs."""

    rules: ClassVar[ConfigRules] = RULES
    model_class = Qwen3Model

    @classmethod
    def check(cls, config: PretrainedConfig, plan: ParallelPlan) -> None:
        """Raise `ConfigError` naming a field that is not implemented, or a degree that does not divide the
        model.
        """
        super().check(config, plan)
        check_layer_types(config)
