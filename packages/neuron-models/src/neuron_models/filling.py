# SPDX-License-Identifier: Apache-2.0
"""Filling parameters from ranges of files, several at once, with the ranges to come already on their way."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from neuron_core.devices.host import Host
from neuron_core.errors import CheckpointError
from neuron_models.checkpoint import TensorInfo, map_rows

PIECE_BYTES = 8 << 20
"""Stored bytes that one reader takes at a time."""

PREFETCH_PIECES = 16
"""Pieces the kernel is asked to read ahead of the one that is copied."""

MAX_READERS = 8
"""More do not read faster: they wait for the same memory."""

SERIAL_ELEMENTS = 32_000
"""torch copies fewer elements than this on the thread that asks; more would start threads of each reader's own."""

Progress = Callable[[int, int], None]
"""Called with the stored bytes read so far and how many there are."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows ``first:last`` of a stored tensor, of which ``start:stop`` along ``dim`` (if not 0) go to ``target``."""

    info: TensorInfo
    first: int
    last: int
    dim: int
    start: int
    stop: int
    target: Tensor

    @property
    def offset(self) -> int:
        """Where in the file its rows begin."""
        return self.info.offset + self.first * self.info.row_bytes

    @property
    def size_bytes(self) -> int:
        """Stored bytes of its rows."""
        return (self.last - self.first) * self.info.row_bytes

    @property
    def is_verbatim(self) -> bool:
        """Whether the bytes of the file are, as they lie there, those of the parameter."""
        target = self.target
        is_cast = target.dtype != self.info.torch_dtype
        return self.dim == 0 and not is_cast and target.is_contiguous() and target.device.type == "cpu"


def pieces_of(info: TensorInfo, dim: int, start: int, stop: int, target: Tensor) -> Iterator[Piece]:
    """Cut ``start:stop`` along ``dim`` of a stored tensor into pieces of about `PIECE_BYTES` along dim 0."""
    first, last = (start, stop) if dim == 0 else (0, info.shape[0])
    rows = max(1, PIECE_BYTES // max(1, info.row_bytes))
    for row in range(first, last, rows):
        end = min(row + rows, last)
        yield Piece(info, row, end, dim, start, stop, target.narrow(0, row - first, end - row))


def readers_for(ranks_on_host: int) -> int:
    """How many pieces a rank reads at once: as many as it has processors, at most `MAX_READERS`."""
    return max(1, min(MAX_READERS, len(Host().cpus()) // ranks_on_host))


def fill(pieces: Sequence[Piece], readers: int, progress: Progress | None = None) -> None:
    """Read every piece into its target.

    Raises `CheckpointError` naming a file that ends early; some targets are filled then.
    """
    ordered = sorted(pieces, key=lambda piece: (piece.info.file, piece.offset))
    total, done = sum(piece.size_bytes for piece in ordered), 0
    with contextlib.ExitStack() as stack:
        files = {
            file: stack.enter_context(file.open("rb", buffering=0)).fileno()
            for file in dict.fromkeys(piece.info.file for piece in ordered)
        }
        for piece in ordered[:PREFETCH_PIECES]:
            _prefetch(piece, files)

        def read(index: int) -> int:
            for ahead in ordered[index + PREFETCH_PIECES : index + PREFETCH_PIECES + 1]:
                _prefetch(ahead, files)
            _read(ordered[index], files[ordered[index].info.file])
            return ordered[index].size_bytes

        pool = stack.enter_context(ThreadPoolExecutor(readers, "weights", _use_every_processor))
        for size in pool.map(read, range(len(ordered))):
            done += size
            if progress is not None:
                progress(done, total)


def _use_every_processor() -> None:
    # A thread starts on the processors of the one that made it, and a device has bound that one to a single one.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, Host().allowed)


def _prefetch(piece: Piece, files: dict[Path, int]) -> None:
    os.posix_fadvise(files[piece.info.file], piece.offset, piece.size_bytes, os.POSIX_FADV_WILLNEED)


def _read(piece: Piece, file: int) -> None:
    if piece.is_verbatim:
        _read_bytes(piece, file)
        return
    rows = map_rows(piece.info, piece.first, piece.last)
    source = rows if piece.dim == 0 else rows.narrow(piece.dim, piece.start, piece.stop - piece.start)
    _copy(piece.target, source)


def _read_bytes(piece: Piece, file: int) -> None:
    """Straight from the page cache into the parameter: nothing is mapped, and no buffer lies between."""
    left, offset = piece.target.flatten().view(torch.uint8).numpy().data, piece.offset
    while left:
        count = os.preadv(file, [left], offset)
        if count == 0:
            raise CheckpointError(f"{piece.info.file}: became shorter while it was read")
        left, offset = left[count:], offset + count


def _copy(target: Tensor, source: Tensor) -> None:
    if target.is_contiguous() and source.is_contiguous():
        target, source = target.view(-1), source.view(-1)
    rows = max(1, SERIAL_ELEMENTS * target.shape[0] // max(1, target.numel()))
    for row in range(0, target.shape[0], rows):
        target[row : row + rows].copy_(source[row : row + rows])
