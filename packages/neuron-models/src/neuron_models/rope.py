# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding tables for every scaling that depends on nothing but the position."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from neuron_core.errors import ConfigError

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_rope(config: PretrainedConfig) -> None:
    """Raise `ConfigError` for a RoPE scaling this cannot compute ahead of time.

    ``dynamic`` and ``longrope`` change the frequencies with the length of the running sequence.
    """
    parameters = config.rope_parameters
    rope_type = parameters["rope_type"]
    if rope_type not in STATIC_ROPE_TYPES:
        raise ConfigError(
            "rope_type", rope_type, f"is not implemented; use one of {', '.join(STATIC_ROPE_TYPES)}"
        )
    factor = parameters.get("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise ConfigError("partial_rotary_factor", factor, "is not implemented; use 1.0")


def inverse_frequencies(config: PretrainedConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies float32 ``[head_dim / 2]`` and the factor on cos and sin, as transformers defines
    them.
    """
    parameters = config.rope_parameters
    # The table is real even where the model is made on the meta device.
    with torch.device("cpu"):
        if parameters["rope_type"] != "default":
            inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
            return inv_freq.float(), float(attention_factor)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0


class RotaryTable(nn.Module):
    """``positions int32 [T]`` to the ``cos`` and ``sin`` float32 ``[T, head_dim / 2]`` that all layers of a
    step share.
    """

    inv_freq: Tensor

    def __init__(self, config: PretrainedConfig, head_dim: int) -> None:
        super().__init__()
        inv_freq, self.attention_factor = inverse_frequencies(config, head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The table's rows at ``positions``."""
        angles = positions.float().unsqueeze(1) * self.inv_freq
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
