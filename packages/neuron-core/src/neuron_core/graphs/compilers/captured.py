# SPDX-License-Identifier: Apache-2.0
"""A captured graph on disk: enough to lower and compile it in another process, environment or machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neuron_core.errors import CacheError
from neuron_core.graphs.capture import CapturedGraph
from neuron_core.graphs.compilers.base import ArtifactMetadata
from neuron_core.graphs.compilers.fx import GRAPH_FILE, NAMESPACE, write_graph_source
from neuron_core.graphs.program import TensorSpec

__all__ = ["INPUTS_FILE", "CapturedFiles", "graph_function", "write_captured"]

INPUTS_FILE = "inputs.json"


@dataclass(frozen=True)
class CapturedFiles:
    """What ``inputs.json`` and ``graph.json`` say of a graph that ``graph.py`` holds as source.

    ``names`` and ``specs`` are those of ``[*weights, *inputs]``, the first ``num_weights`` being weights, ``outputs``
    the specs of all outputs, new values of inputs last. ``groups`` maps the name of each process group the source
    uses to its ranks, relative to the lowest.
    """

    label: str
    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    num_weights: int
    outputs: tuple[TensorSpec, ...]
    groups: dict[str, list[int]]
    metadata: ArtifactMetadata

    @classmethod
    def read(cls, folder: Path) -> CapturedFiles:
        """Read a folder that ``write_captured`` wrote; raises ``CacheError`` when it is not one."""
        metadata = ArtifactMetadata.read(folder)
        path = folder / INPUTS_FILE
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            entries = [*data["weights"], *data["inputs"]]
            return cls(
                label=data["label"],
                names=tuple(entry["name"] for entry in entries),
                specs=tuple(TensorSpec.from_json(entry) for entry in entries),
                num_weights=len(data["weights"]),
                outputs=tuple(TensorSpec.from_json(entry) for entry in data["outputs"]),
                groups=dict(zip(metadata.groups, data["group_ranks"], strict=True)),
                metadata=metadata,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheError(f"{path} does not describe a captured graph: {error}") from error


def graph_function(folder: Path) -> Callable[..., Sequence[torch.Tensor]]:
    """The pure function of ``graph.py``: ``forward(None, *inputs)`` returns all outputs, new values of inputs too.

    Raises ``CacheError`` when the file cannot be read.
    """
    path = folder / GRAPH_FILE
    namespace = dict(NAMESPACE)
    try:
        exec(compile(path.read_text(), str(path), "exec"), namespace)
        forward: Callable[..., Sequence[torch.Tensor]] = namespace["forward"]
    except (OSError, SyntaxError, KeyError) as error:
        raise CacheError(f"{path} is not a stored graph: {error}") from error
    return forward


def write_captured(graph: CapturedGraph, folder: Path) -> None:
    """Write the pure graph into ``folder``, made if needed: ``graph.py``, ``graph.json`` and ``inputs.json``.

    Nothing is pickled and no weight is written. Raises ``CompileError`` when the graph cannot be stored as text,
    or uses a process group this process does not have.
    """
    from neuron_core.graphs.key import normalised_groups

    folder.mkdir(parents=True, exist_ok=True)
    write_graph_source(graph, folder)
    ArtifactMetadata.of(graph).write(folder)
    named = [
        {"name": name, **spec.to_json()}
        for name, spec in zip((*graph.weights, *graph.inputs), graph.input_specs, strict=True)
    ]
    split = len(graph.weights)
    facts = {
        "label": graph.label,
        "torch": torch.__version__,
        "weights": named[:split],
        "inputs": named[split:],
        "outputs": [TensorSpec.of(node.meta["val"]).to_json() for node in graph.output_nodes()],
        "group_ranks": normalised_groups(graph.groups()),
    }
    (folder / INPUTS_FILE).write_text(json.dumps(facts, indent=1))
