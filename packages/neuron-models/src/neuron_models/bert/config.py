# SPDX-License-Identifier: Apache-2.0
"""What BERT encoders read from a Hugging Face config."""

from dataclasses import dataclass
from typing import Self

from transformers import PretrainedConfig

from neuron_models.config import ConfigRules

RULES = ConfigRules(
    read=frozenset(
        {
            "hidden_size",
            "intermediate_size",
            "layer_norm_eps",
            "max_position_embeddings",
            "num_attention_heads",
            "num_hidden_layers",
            "type_vocab_size",
            "vocab_size",
            # Without effect on an encoder that is not trained and has no head.
            "attention_probs_dropout_prob",
            "classifier_dropout",
            "gradient_checkpointing",
            "hidden_dropout_prob",
            "tie_word_embeddings",
        }
    ),
    fixed={
        "hidden_act": ("gelu",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",),
    },
)


@dataclass(frozen=True)
class BertSpec:
    """Sizes of one encoder, of the whole model rather than of a rank."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    num_token_types: int
    layer_norm_eps: float

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> Self:
        """Read a config whose fields were checked."""
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_positions=config.max_position_embeddings,
            num_token_types=config.type_vocab_size,
            layer_norm_eps=config.layer_norm_eps,
        )
