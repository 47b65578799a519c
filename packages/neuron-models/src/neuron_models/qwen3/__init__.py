# SPDX-License-Identifier: Apache-2.0
"""Qwen3 dense models."""

from neuron_models.qwen3.model import Qwen3ForCausalLM

__all__ = ["Qwen3ForCausalLM"]
