# SPDX-License-Identifier: Apache-2.0
"""What the Llama family reads from a Hugging Face config."""

from dataclasses import dataclass
from typing import Self

from transformers import PretrainedConfig

from neuron_models.config import ConfigRules

RULES = ConfigRules(
    read=frozenset(
        {
            "attention_bias",
            "head_dim",
            "hidden_size",
            "intermediate_size",
            "mlp_bias",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_parameters",
            "rope_scaling",
            "rope_theta",
            "tie_word_embeddings",
            "vocab_size",
        }
    ),
    fixed={"hidden_act": ("silu",), "pretraining_tp": (1, None), "rope_interleaved": (False, None)},
)


@dataclass(frozen=True)
class LlamaSpec:
    """Sizes and switches of one decoder, of the whole model rather than of a rank."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> Self:
        """Read a config whose fields were checked."""
        heads = config.num_attention_heads
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=config.rms_norm_eps,
            attention_bias=getattr(config, "attention_bias", False),
            mlp_bias=getattr(config, "mlp_bias", False),
            tie_word_embeddings=config.tie_word_embeddings,
        )
