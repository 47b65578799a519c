# SPDX-License-Identifier: Apache-2.0
"""Who an engine is, for what it is compared with."""

from __future__ import annotations

from pathlib import Path

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from neuron_accuracy.subjects.digest import NO_TOKENIZER, model_digest, vocabulary_digest
from neuron_accuracy.subjects.info import SubjectInfo

__all__ = ["ABILITIES", "KIND", "subject_info"]

KIND = "vllm-neuron"
ABILITIES = frozenset({"logits", "logprobs", "generate", "capture", "kv", "replace"})


def subject_info(config: VllmConfig) -> SubjectInfo:
    """Of the engine with this configuration; ``revision`` is that of the weights' files, or of the hub."""
    model = config.model_config
    folder = Path(model.model)
    parallel = {"tp": config.parallel_config.tensor_parallel_size}
    return SubjectInfo(
        KIND,
        model.model,
        model_digest(folder) if folder.is_dir() else str(model.revision),
        str(model.dtype).removeprefix("torch."),
        model.get_vocab_size(),
        NO_TOKENIZER if model.skip_tokenizer_init else vocabulary_digest(cached_tokenizer_from_config(model)),
        ABILITIES,
        {axis: degree for axis, degree in parallel.items() if degree > 1},
        "float8_e4m3fn" if config.cache_config.cache_dtype.startswith("fp8") else "auto",
    )
