# SPDX-License-Identifier: Apache-2.0
"""Our models in vLLM's eyes: one stub class per architecture, so that vLLM can ask what a model is.

vLLM inspects a class before it starts anything. Its own models it inspects in a subprocess that imports them
(17 s); a class object it inspects in place. The stubs hold no weights: ``neuron_models`` builds the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from neuron_core.errors import ConfigError
from neuron_models import registry

__all__ = ["StubModel", "check_architectures", "register_models", "stub_class"]


class StubModel(nn.Module):
    """What vLLM looks for in any model; calling any of it is a defect and raises."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self._refuse()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Not available."""
        self._refuse()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Not available."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} stands for a model that runs as compiled graphs")


class DecoderStub(StubModel):
    """A model that generates text, or embeds with ``--runner pooling``."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Not available."""
        self._refuse()


class PoolingStub(StubModel):
    """A model that cannot generate."""

    is_pooling_model = True


class EncoderStub(PoolingStub):
    """A pooling model whose tokens see the whole text, which vLLM then neither chunks nor caches."""

    default_seq_pooling_type = "CLS"
    attn_type = "encoder_only"


class ClassifierStub(PoolingStub):
    """A model that classifies, and that scores a pair of texts if it has one class."""

    score_type = "cross-encoder"


class EncoderClassifierStub(EncoderStub, ClassifierStub):
    """A classifier whose tokens see the whole text."""


STUBS = {
    "BertForSequenceClassification": EncoderClassifierStub,
    "BertModel": EncoderStub,
    "LlamaForSequenceClassification": ClassifierStub,
    "LlamaModel": PoolingStub,
    "Qwen3ForSequenceClassification": ClassifierStub,
    "Qwen3Model": PoolingStub,
}
"""What a name stands for that ends otherwise than in ``ForCausalLM``."""


def stub_class(architecture: str) -> type[StubModel]:
    """A stub named after the architecture, as vLLM reports the class name."""
    base = STUBS.get(architecture, DecoderStub)
    return type(architecture, (base,), {"__doc__": base.__doc__, "__module__": __name__})


def register_models(architectures: Iterable[str] | None = None) -> None:
    """Register a stub with vLLM for every architecture of ``neuron_models.registry``, replacing vLLM's own.

    Architectures another package registers are included if it did so first; ``check_architectures`` catches
    up with those registered later.
    """
    from vllm.model_executor.models import ModelRegistry

    for architecture in registry.supported_architectures() if architectures is None else architectures:
        known = ModelRegistry.models.get(architecture)
        if not issubclass(getattr(known, "model_cls", type(None)), StubModel):
            ModelRegistry.register_model(architecture, stub_class(architecture))


def check_architectures(architectures: Sequence[str]) -> None:
    """Raise ``ConfigError`` listing what is supported unless one of a checkpoint's ``architectures`` is."""
    supported = registry.supported_architectures()
    if not set(architectures) & set(supported):
        raise ConfigError(
            "architectures", list(architectures), f"is not supported; use one of {', '.join(supported)}"
        )
    register_models()
