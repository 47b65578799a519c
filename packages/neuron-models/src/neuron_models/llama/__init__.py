# SPDX-License-Identifier: Apache-2.0
"""The Llama 3 family (and models of the same architecture: Llama 2, SmolLM2, TinyLlama)."""

from neuron_models.llama.config import LlamaSpec
from neuron_models.llama.model import LlamaForCausalLM

__all__ = ["LlamaForCausalLM", "LlamaSpec"]
