# SPDX-License-Identifier: Apache-2.0
"""What compilers share: the facts about a graph that travel with its artifact."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neuron_core.errors import CacheError
from neuron_core.graphs.capture import CapturedGraph

__all__ = ["METADATA_FILE", "ArtifactMetadata"]

METADATA_FILE = "graph.json"


@dataclass(frozen=True)
class ArtifactMetadata:
    """What loading needs: the io map, the output count and the groups the artifact was built with."""

    num_inputs: int
    num_outputs: int
    io_map: tuple[tuple[int, int], ...]
    groups: tuple[str, ...]

    @classmethod
    def of(cls, graph: CapturedGraph) -> ArtifactMetadata:
        """Read them off a graph."""
        io_map = tuple(sorted(graph.io_map.items()))
        return cls(len(graph.input_specs), graph.num_outputs, io_map, graph.groups())

    def write(self, folder: Path) -> None:
        """Store as ``graph.json``."""
        (folder / METADATA_FILE).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> ArtifactMetadata:
        """Load ``graph.json``; raises ``CacheError`` when it is missing or malformed."""
        try:
            data: dict[str, Any] = json.loads((folder / METADATA_FILE).read_text())
            io_map = tuple((int(out), int(index)) for out, index in data["io_map"])
            return cls(data["num_inputs"], data["num_outputs"], io_map, tuple(data["groups"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheError(f"{folder / METADATA_FILE} is not a graph description: {error}") from error

    def rename_groups(self, source: str, groups: tuple[str, ...]) -> str:
        """``source`` with the process-group names it was compiled with replaced by this process's names."""
        for index, name in enumerate(self.groups):
            source = source.replace(repr(name), f"'\\0{index}'")
        for index, name in enumerate(groups):
            source = source.replace(f"'\\0{index}'", repr(name))
        return source
