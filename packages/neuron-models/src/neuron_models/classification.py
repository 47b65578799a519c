# SPDX-License-Identifier: Apache-2.0
"""Heads that turn a text's hidden state into logits of classes: a few small products, in float32, on the host."""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from neuron_core.errors import ConfigError
from neuron_parallel import replicated_parameter

SUFFIX = "ForSequenceClassification"
"""How the architectures whose checkpoints hold a head are called."""

LANGUAGE_MODEL_HEADS = ("classifier_from_token", "method")
"""Config fields by which vLLM makes a head of rows of a language model's head."""


@runtime_checkable
class Classifier(Protocol):
    """A pooling model with a head of its own."""

    def classify(self, pooled: Tensor) -> Tensor:
        """``pooled [texts, hidden]`` -> logits ``[texts, labels]`` float32."""


class HeadLinear(nn.Module):
    """A product of a head: float32, whole on every rank, computed where ``x`` is."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = replicated_parameter((out_features, in_features), torch.float32)
        self.register_parameter(
            "bias", replicated_parameter((out_features,), torch.float32) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x [n, in]`` -> ``[n, out]`` float32."""
        bias = None if self.bias is None else self.bias.to(x.device)
        return F.linear(x.float(), self.weight.to(x.device), bias)


def classifies(config: PretrainedConfig) -> bool:
    """Whether a checkpoint's architecture is that of a classifier."""
    return any(name.endswith(SUFFIX) for name in config.architectures or ())


def check_head(config: PretrainedConfig) -> None:
    """Raise `ConfigError` naming a field that asks for a head that the checkpoint does not hold."""
    for name in LANGUAGE_MODEL_HEADS:
        value = getattr(config, name, None)
        if value is not None:
            hint = "a head made of a language model's is not implemented; save one as score.weight and leave it out"
            raise ConfigError(name, value, hint)
