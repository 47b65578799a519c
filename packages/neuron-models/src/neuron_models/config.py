# SPDX-License-Identifier: Apache-2.0
"""Strict reading of a Hugging Face config: a field the model would have to honour and does not is an
error.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from neuron_core.errors import ConfigError

logger = logging.getLogger(__name__)

_INERT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "is_matryoshka",
        "initializer_range",
        "label2id",
        "matryoshka_dimensions",
        "max_position_embeddings",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "sbert_ce_default_activation_function",
        "sentence_transformers",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "sliding_window": (None,),
}


@dataclass(frozen=True)
class ConfigRules:
    """Which fields a model family reads, and which it accepts at certain values only.

    Fields without effect on inference are known here. A field that transformers declares, that is not at its
    default and that no rule names is refused; a field that transformers does not know either is reported once
    and ignored, as transformers ignores it.
    """

    read: frozenset[str]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, config: PretrainedConfig) -> None:
        """Raise `ConfigError` naming the first field that cannot be honoured."""
        for name, allowed in {**self.fixed, **_FIXED}.items():
            value = getattr(config, name, allowed[0])
            if value not in allowed:
                raise ConfigError(
                    name, value, f"is not implemented for {config.model_type}; use {allowed[0]!r}"
                )
        known = self.read | _INERT | _FIXED.keys() | self.fixed.keys()
        defaults = type(config)()
        unread = {name: value for name, value in config.to_diff_dict().items() if name not in known}
        declared = {name: getattr(defaults, name) for name in unread if hasattr(defaults, name)}
        for name, default in declared.items():
            if unread[name] != default:
                hint = f"is not implemented for {config.model_type}; use {default!r}"
                raise ConfigError(name, unread[name], hint)
        if unknown := ", ".join(sorted(unread.keys() - declared.keys())):
            logger.warning("config fields that transformers does not know are ignored: %s", unknown)
