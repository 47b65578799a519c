# SPDX-License-Identifier: Apache-2.0
"""The header of a NEFF, the file the Neuron runtime loads.

Layout as published (aws-neuron-sdk: neuron-runtime/explore/work-with-neff-files.rst): 1024 bytes, then a tar
archive, gzipped unless it was compiled for fast loading. No NEFF of a real compiler has been read with this yet.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from neuron_core.errors import CacheError

__all__ = ["HEADER_BYTES", "NeffHeader"]

HEADER_BYTES = 1024

_LAYOUT = struct.Struct("<5Q 128s I 32s 16s 256s I 64s Q I")
"""The documented fields up to ``lnc_size``; each lies on its natural boundary, so nothing is padded."""


@dataclass(frozen=True)
class NeffHeader:
    """What the header says; ``lnc`` is 0 where the compiler did not record the logical core size."""

    header_bytes: int
    data_bytes: int
    version: str
    build: str
    name: str
    lnc: int

    @classmethod
    def read(cls, path: Path) -> NeffHeader:
        """Read and check a NEFF's header; raises ``CacheError`` saying what is wrong with the file."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                data = file.read(HEADER_BYTES)
        except OSError as error:
            raise CacheError(f"{path} cannot be read: {error}") from error
        if len(data) < HEADER_BYTES:
            raise CacheError(f"{path} is no NEFF: {size} bytes, its header alone has {HEADER_BYTES}")
        _, header, content, major, minor, build, _, _, _, name, _, _, _, lnc = _LAYOUT.unpack_from(data)
        if header != HEADER_BYTES:
            raise CacheError(f"{path} is no NEFF: its header claims {header} bytes instead of {HEADER_BYTES}")
        if content == 0 or header + content > size:
            raise CacheError(
                f"{path} is truncated or damaged: {size} bytes, its header promises {header} + {content}"
            )
        return cls(header, content, f"{major}.{minor}", _text(build), _text(name), lnc)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "replace")
