# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a checkpoint folder: which tensors they hold, and reading slices of them."""

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from neuron_core.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WINDOW_BYTES = 32 << 20
HEADER_SIZE_BYTES = 8

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: its file, shape, safetensors dtype name, and at which byte its values begin."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the values; raises ``KeyError`` for one that `check_float` refuses."""
        return _DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dim 0."""
        return self.torch_dtype.itemsize * math.prod(self.shape[1:])


class Checkpoint:
    """The tensors of a folder by name. Opening it reads the files' headers only.

    Follows ``model.safetensors.index.json`` if there is one, else reads ``model.safetensors``, else every
    ``*.safetensors`` file. Raises `CheckpointError` naming the file that is missing, truncated or contradicts
    the index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, TensorInfo] = {}
        index = _read_index(self.folder)
        for file in _files(self.folder, index):
            self._add(file)
        if index is not None:
            _check_index(self.folder, index, self.tensors)

    def _add(self, file: Path) -> None:
        for name, entry in _header(file).items():
            if name in self.tensors:
                raise CheckpointError(f"{name} is in two files: {self.tensors[name].file} and {file}")
            self.tensors[name] = entry

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(first_row, piece)`` that together are ``start:stop`` along ``dim`` of the tensor ``name``.

        Pieces are cut along dim 0. With ``dim`` 0 ``first_row`` counts from ``start``. Let a piece go before asking
        for the next one: each maps at most `WINDOW_BYTES` of the file, so that pages read do not add up.
        """
        info = self.tensors[name]
        first, last = (start, stop) if dim == 0 else (0, info.shape[0])
        rows = max(1, WINDOW_BYTES // max(1, info.row_bytes))
        for row in range(first, last, rows):
            piece = map_rows(info, row, min(row + rows, last))
            yield row - first, piece if dim == 0 else piece.narrow(dim, start, stop - start)


def map_rows(info: TensorInfo, first: int, last: int) -> Tensor:
    """Rows ``first:last`` along dim 0 as a tensor over the mapped file, unmapped when nothing refers to it.

    Only read from it. Raises `CheckpointError` if the file has become shorter than its header says.
    """
    begin = info.offset + first * info.row_bytes
    length = (last - first) * info.row_bytes
    slack = begin % mmap.ALLOCATIONGRANULARITY
    if length == 0:
        return torch.empty((last - first, *info.shape[1:]), dtype=info.torch_dtype)
    with info.file.open("rb") as file:
        if os.fstat(file.fileno()).st_size < begin + length:
            raise CheckpointError(f"{info.file}: became shorter while it was read")
        # A private mapping: torch warns of tensors over memory that cannot be written.
        pages = mmap.mmap(file.fileno(), length + slack, access=mmap.ACCESS_COPY, offset=begin - slack)
    values = torch.frombuffer(pages, dtype=info.torch_dtype, offset=slack)
    return values.view(last - first, *info.shape[1:])


def check_float(name: str, info: TensorInfo) -> str | None:
    """What is wrong with the dtype of a tensor that is loaded by casting, if anything."""
    if info.dtype in _DTYPES:
        return None
    return f"{name} has dtype {info.dtype}; only {', '.join(_DTYPES)} can be loaded"


def _header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a file whose header the library has found to agree with the file's size."""
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(HEADER_SIZE_BYTES))
            entries: dict[str, dict[str, Any]] = json.loads(opened.read(size))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a complete safetensors file ({error})") from error
    entries.pop("__metadata__", None)
    begin = HEADER_SIZE_BYTES + size
    return {
        name: TensorInfo(file, tuple(entry["shape"]), entry["dtype"], begin + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


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
