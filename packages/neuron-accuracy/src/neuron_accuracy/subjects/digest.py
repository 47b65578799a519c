# SPDX-License-Identifier: Apache-2.0
"""Digests that say whether two folders hold the same model, and two tokenizers give ids the same meaning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from neuron_accuracy.errors import SubjectError

__all__ = ["NO_TOKENIZER", "model_digest", "state_digest", "vocabulary_digest"]

NO_TOKENIZER = "none"
"""In the place of a vocabulary's digest, for a model that has no tokenizer."""

READ_WHOLE_BYTES = 2 * 2**30
_SAMPLES = 256
_SAMPLE_BYTES = 16 * 2**10
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def model_digest(folder: Path) -> str:
    """SHA-256 over the configuration and the weight files of a folder.

    Up to 2 GiB of weights are read whole; of more, each file's size, its first 16 KiB (the header of a safetensors
    file) and 255 samples spread evenly over it. Raises ``SubjectError`` if there are no weights.
    """
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not files:
        raise SubjectError(f"{folder}: no weights ({', '.join(_WEIGHTS)}); the folder of a saved model works")
    whole = sum(path.stat().st_size for path in files) <= READ_WHOLE_BYTES
    digest = hashlib.sha256()
    for extra in sorted((*folder.glob("config.json"), *folder.glob("*.index.json"))):
        digest.update(extra.name.encode() + extra.read_bytes())
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(_whole(path) if whole else _sampled(path))
    return digest.hexdigest()


def _whole(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sampled(path: Path) -> bytes:
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek(size * index // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def state_digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of a module's state."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def vocabulary_digest(tokenizer: Any) -> str:
    """SHA-256 over what each token id of a tokenizer of transformers stands for; ``NO_TOKENIZER`` for None."""
    if tokenizer is None:
        return NO_TOKENIZER
    entries = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
