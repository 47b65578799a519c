# SPDX-License-Identifier: Apache-2.0
"""What Qwen3 dense models read from a Hugging Face config."""

from transformers import PretrainedConfig

from neuron_core.errors import ConfigError
from neuron_models.config import ConfigRules
from neuron_models.llama.config import RULES as LLAMA_RULES

RULES = ConfigRules(
    # max_window_layers has no effect while no layer has a window, which check_layer_types makes sure of.
    read=(LLAMA_RULES.read - {"mlp_bias"}) | {"layer_types", "max_window_layers"},
    fixed={"hidden_act": ("silu",), "use_sliding_window": (False,)},
)


def check_layer_types(config: PretrainedConfig) -> None:
    """Raise `ConfigError` if a layer attends over a window."""
    others = sorted(set(config.layer_types) - {"full_attention"})
    if others:
        raise ConfigError(
            "layer_types", others, "is not implemented for qwen3; use 'full_attention' in every layer"
        )
