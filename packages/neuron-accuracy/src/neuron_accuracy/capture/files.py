# SPDX-License-Identifier: Apache-2.0
"""One rank's tensors in a folder: a safetensors file, and beside it what each tensor must be."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from neuron_accuracy.capture.records import FORMAT
from neuron_accuracy.errors import CaptureError

__all__ = ["digest", "elements", "read_json", "size_bytes", "write_json", "write_tensors"]


def size_bytes(tensors: Mapping[Any, torch.Tensor]) -> int:
    """Bytes of their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the elements in memory order of a contiguous CPU tensor, in hex."""
    return hashlib.sha256(elements(tensor)).hexdigest()


def elements(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor's elements in order, any dtype."""
    held = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return held.data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file that appears whole or not at all; raises ``CaptureError`` naming it."""
    _replace(path, lambda temporary: temporary.write_text(json.dumps(data, indent=1) + "\n"))


def write_tensors(folder: Path, rank: int, tensors: Mapping[str, torch.Tensor], order: int) -> None:
    """Write ``rank<r>.safetensors`` and ``rank<r>.json``; ``order`` is the module's place in its step."""
    # Copies: outputs may share memory with each other, which the format cannot say.
    held = {
        name: tensor.detach().to("cpu", copy=True).contiguous().reshape(tensor.shape)
        for name, tensor in tensors.items()
    }
    described = {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sha256": digest(tensor),
        }
        for name, tensor in held.items()
    }
    _replace(folder / f"rank{rank}.safetensors", lambda temporary: save_file(held, temporary))
    write_json(folder / f"rank{rank}.json", {"format": FORMAT, "order": order, "tensors": described})


def read_json(path: Path) -> dict[str, Any]:
    """Read what ``write_json`` wrote; raises ``CaptureError`` naming the file when it is missing, cut short or of
    another format.
    """
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CaptureError(
            f"{path} is missing: the capture ended early, or a part of it was removed"
        ) from error
    except (OSError, ValueError) as error:
        raise CaptureError(f"{path} cannot be read: {error}; it is damaged, or cut short") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise CaptureError(f"{path} is of format {found!r}; this version reads {FORMAT!r}")
    return data


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.replace(path)
    except Exception as error:
        # The system, or a dtype that the format cannot hold: neither may end an engine.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CaptureError(f"{path} cannot be written: {error}") from error
