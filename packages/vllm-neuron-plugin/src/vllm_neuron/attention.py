# SPDX-License-Identifier: Apache-2.0
"""The attention backend vLLM is told about: a name and a block-size rule; attention is in the graphs."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from vllm_neuron.checks import BLOCK_SIZE_MULTIPLE

__all__ = ["NeuronAttentionBackend"]


class NeuronAttentionBackend(AttentionBackend):
    """Describes the KV cache to vLLM (KV connectors hash the name); no vLLM attention layer ever runs."""

    supported_dtypes = [torch.bfloat16, torch.float32]  # noqa: RUF012 - the base class declares it so
    supported_kv_cache_dtypes = ["auto", "bfloat16", "fp8", "fp8_e4m3"]  # noqa: RUF012

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any multiple of ``BLOCK_SIZE_MULTIPLE``."""
        return [MultipleOf(BLOCK_SIZE_MULTIPLE)]

    @staticmethod
    def get_name() -> str:
        """``NEURON_PAGED``."""
        return "NEURON_PAGED"

    @staticmethod
    def get_impl_cls() -> NoReturn:
        """Not available: raises ``NotImplementedError``."""
        raise NotImplementedError(
            "attention runs inside compiled graphs; vLLM's attention layers are not used"
        )

    @staticmethod
    def get_builder_cls() -> NoReturn:
        """Not available: raises ``NotImplementedError``."""
        raise NotImplementedError("step inputs are built by vllm_neuron.runner; vLLM's metadata is not used")
