# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a checkpoint folder: which tensors they hold, and reading slices of them."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from neuron_core.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WINDOW_BYTES = 32 << 20

_DTYPES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: its file, shape and safetensors dtype name."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a folder by name. Opening it reads the files' headers only.

    Follows ``model.safetensors.index.json`` if there is one, else reads ``model.safetensors``, else every
    ``*.safetensors`` file. Raises `CheckpointError` naming the file that is missing, truncated or contradicts
    the index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, TensorInfo] = {}
        self._handle: Any = None
        self._mapped_file: Path | None = None
        self._mapped_bytes = 0
        index = _read_index(self.folder)
        for file in _files(self.folder, index):
            self._add(file)
        if index is not None:
            _check_index(self.folder, index, self.tensors)

    def _add(self, file: Path) -> None:
        handle = _open(file)
        for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
            if name in self.tensors:
                raise CheckpointError(f"{name} is in two files: {self.tensors[name].file} and {file}")
            view = handle.get_slice(name)
            self.tensors[name] = TensorInfo(file, tuple(view.get_shape()), view.get_dtype())

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(first_row, piece)`` that together are ``start:stop`` along ``dim`` of the tensor ``name``.

        Pieces are cut along dim 0. With ``dim`` 0 ``first_row`` counts from ``start``. Copy a piece before
        asking for the next one: a file is mapped anew every `WINDOW_BYTES`, so that pages read do not add up.
        """
        info = self.tensors[name]
        first, last = (start, stop) if dim == 0 else (0, info.shape[0])
        row_bytes = _DTYPES[info.dtype] * math.prod(info.shape[1:])
        rows = max(1, WINDOW_BYTES // max(1, row_bytes))
        for row in range(first, last, rows):
            end = min(row + rows, last)
            window = (slice(row, end), *[slice(None)] * (dim - 1), *[slice(start, stop)] * (dim > 0))
            yield row - first, self._map(info.file, (end - row) * row_bytes).get_slice(name)[window]

    def _map(self, file: Path, size_bytes: int) -> Any:
        if file != self._mapped_file or self._mapped_bytes + size_bytes > WINDOW_BYTES:
            self._handle, self._mapped_file, self._mapped_bytes = _open(file), file, 0
        self._mapped_bytes += size_bytes
        return self._handle


def check_float(name: str, info: TensorInfo) -> str | None:
    """What is wrong with the dtype of a tensor that is loaded by casting, if anything."""
    if info.dtype in _DTYPES:
        return None
    return f"{name} has dtype {info.dtype}; only {', '.join(_DTYPES)} can be loaded"


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a complete safetensors file ({error})") from error


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: not a safetensors index ({error!r})") from error
    return {str(name): str(file) for name, file in weight_map.items()}


def _files(folder: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        files = [folder / name for name in sorted(set(index.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{folder / INDEX} lists files that are not there: {', '.join(missing)}")
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: holds no *.safetensors file (other checkpoint formats are not read)"
        )
    return files


def _check_index(folder: Path, index: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    wrong = sorted(
        name for name, file in index.items() if name not in tensors or tensors[name].file.name != file
    ) + sorted(tensors.keys() - index.keys())
    if wrong:
        raise CheckpointError(f"{folder / INDEX} disagrees with its files on: {', '.join(wrong[:20])}")
