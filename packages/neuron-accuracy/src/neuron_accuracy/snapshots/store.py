# SPDX-License-Identifier: Apache-2.0
"""One call of one graph on disk: the graph, what went in, and what came out.

Below the folder of snapshots: ``step<n>/<part>/rank<r>/`` with ``graph.py`` and ``graph.json`` (the pure graph, as the
``fx`` compiler stores it), ``inputs.safetensors``, ``outputs.safetensors`` and ``call.json``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuron_accuracy.errors import CaptureError
from neuron_core.graphs.capture import CapturedGraph
from neuron_core.graphs.compilers.base import ArtifactMetadata
from neuron_core.graphs.compilers.fx import write_graph_source

__all__ = ["FORMAT", "CallRecord", "StoredCall", "find_calls", "read_call", "write_call"]

FORMAT = "neuron-accuracy-snapshot/1"


@dataclass(frozen=True)
class CallRecord:
    """What a call was."""

    part: str
    bucket: str
    step: int
    rank: int
    compiler: str
    """What had compiled the graph that ran."""
    selected_by: tuple[str, ...]
    """The rules that chose the step."""
    names: tuple[str, ...]
    """Of each input: weights, then the part's inputs."""
    num_weights: int
    changed: tuple[int, ...]
    """Inputs that the call writes; their new values are among what came out, as ``input.<index>``."""
    ranks: int = 1
    """Of the process groups the graph communicates over, the largest; 1 if it does not."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file, by name."""


@dataclass(frozen=True, eq=False)
class StoredCall:
    """A call read back."""

    folder: Path
    record: CallRecord
    inputs: tuple[Tensor, ...]
    outputs: Mapping[str, Tensor]
    """``output.<index>``, and ``input.<index>`` of those that were changed."""


def write_call(
    folder: Path,
    graph: CapturedGraph,
    record: CallRecord,
    inputs: Sequence[Tensor],
    outputs: Mapping[str, Tensor],
) -> None:
    """Write a call into ``folder``, which appears whole or not at all; raises ``CaptureError``."""
    staging = folder.with_name(f".{folder.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        write_graph_source(graph, staging)
        ArtifactMetadata.of(graph).write(staging)
        given = {str(index): tensor for index, tensor in enumerate(inputs)}
        for name, tensors in (("inputs", given), ("outputs", outputs)):
            save_file(
                {key: _plain(tensor) for key, tensor in tensors.items()}, staging / f"{name}.safetensors"
            )
        digests = {path.name: _digest(path) for path in sorted(staging.iterdir())}
        described = {"format": FORMAT, **asdict(record), "digests": digests}
        (staging / "call.json").write_text(json.dumps(described, indent=1) + "\n")
        staging.rename(folder)
    except Exception as error:
        # A full disk (of safetensors an error of its own), or a dtype it cannot hold: neither may end an engine.
        shutil.rmtree(staging, ignore_errors=True)
        raise CaptureError(f"{folder} cannot be written: {error}; give an empty folder with room") from error


def find_calls(folder: Path) -> list[Path]:
    """The folders of all calls below ``folder``, itself included, in the order of steps and parts as they ran.

    Raises ``CaptureError`` if there is none.
    """
    found = sorted(path.parent for path in folder.rglob("call.json") if not path.parent.name.startswith("."))
    if not found:
        raise CaptureError(f"{folder} holds no snapshot; neuron_config.input_snapshots writes them")
    return sorted(found, key=lambda path: (read_record(path).step, path.stat().st_mtime_ns, str(path)))


def read_record(folder: Path) -> CallRecord:
    """What a call was; raises ``CaptureError`` naming the file if it is missing, damaged or of another format."""
    path = folder / "call.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise CaptureError(f"{path} is no snapshot of this version; it reads {FORMAT!r}")
        lists = {name: tuple(data[name]) for name in ("selected_by", "names", "changed")}
        return CallRecord(**{**data, **lists})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{path} is damaged: {error!r}") from error


def read_call(folder: Path) -> StoredCall:
    """Read a call; raises ``CaptureError`` naming the file that is missing or not what was written."""
    record = read_record(folder)
    for name, digest in record.digests.items():
        path = folder / name
        if not path.is_file():
            raise CaptureError(f"{path} is missing: a part of the snapshot was removed")
        if _digest(path) != digest:
            raise CaptureError(f"{path} is not what was written: its digest is not the one in call.json")
    try:
        inputs, outputs = (load_file(folder / f"{name}.safetensors") for name in ("inputs", "outputs"))
    except (OSError, SafetensorError) as error:
        raise CaptureError(f"{folder}: its tensors cannot be read: {error}") from error
    if len(inputs) != len(record.names):
        raise CaptureError(f"{folder}: {len(inputs)} inputs for {len(record.names)} names")
    return StoredCall(folder, record, tuple(inputs[str(index)] for index in range(len(inputs))), outputs)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def changed_inputs(graph: CapturedGraph) -> tuple[int, ...]:
    """Inputs that a graph writes."""
    return tuple(sorted(set(graph.io_map.values())))


def is_equal(found: Tensor, expected: Tensor) -> bool:
    """Whether they have one shape, one dtype and the same values; NaN equals NaN, and infinity only itself."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    return bool(torch.isclose(found.double(), expected.double(), rtol=0, atol=0, equal_nan=True).all())
