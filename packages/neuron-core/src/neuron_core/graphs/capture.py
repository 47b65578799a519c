# SPDX-License-Identifier: Apache-2.0
"""Capture of one part on fake tensors: one ATen graph, no breaks, weights lifted to inputs."""

from __future__ import annotations

import inspect
import linecache
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.proxy import TracerBase
from torch.nn.utils import stateless

from neuron_core.errors import CompileError
from neuron_core.graphs.program import Part, TensorSpec
from neuron_core.graphs.signature import tensors_of

__all__ = [
    "CapturedGraph",
    "ReplicaGroup",
    "SharedInputs",
    "capture",
    "explain_failure",
    "group_name",
    "node_place",
]

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)


@dataclass(frozen=True)
class SharedInputs:
    """Which inputs share memory; indices are positions in ``[*weights, *inputs]``.

    ``same_as`` maps an input to the earlier one it is identical to (storage, offset, shape, stride, dtype).
    ``overlaps`` are pairs that have elements in common without being identical. ``passes.shared_inputs``
    reads both off example tensors.
    """

    same_as: Mapping[int, int] = field(default_factory=dict)
    overlaps: tuple[tuple[int, int], ...] = ()

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Raise ``CompileError`` for an index that is no input and for identical inputs of unequal specs."""
        for index, first in self.same_as.items():
            if not 0 <= first < index < len(specs) or first in self.same_as:
                raise CompileError(
                    f"same_as={{{index}: {first}}}: name an earlier input that is no duplicate"
                )
            if specs[index] != specs[first]:
                raise CompileError(
                    f"same_as={{{index}: {first}}}: {specs[index]} and {specs[first]} cannot be identical"
                )
        for pair in self.overlaps:
            if pair[0] == pair[1] or not all(0 <= index < len(specs) for index in pair):
                raise CompileError(f"overlaps={pair}: name two of the {len(specs)} inputs")


@dataclass(frozen=True)
class ReplicaGroup:
    """A process group a graph communicates over: its name in this process and its global ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class CapturedGraph:
    """A captured part and what the passes learn about it.

    Placeholders are ``[*weights, *inputs]``; the output is a flat tuple of which the first ``num_outputs``
    are the part's own. ``io_map`` maps an appended output to the input whose new value it is, and
    ``output_aliases`` an own output to the unwritten input it is; before alias analysis both are empty.
    ``shared`` says which inputs share memory. ``replica_groups`` is None until the pass of that name ran.
    """

    name: str
    module: fx.GraphModule
    weights: tuple[str, ...]
    inputs: tuple[str, ...]
    input_specs: tuple[TensorSpec, ...]
    fake_mode: FakeTensorMode
    num_outputs: int
    bucket: str = ""
    io_map: dict[int, int] = field(default_factory=dict)
    output_aliases: dict[int, int] = field(default_factory=dict)
    shared: SharedInputs = field(default_factory=SharedInputs)
    replica_groups: tuple[ReplicaGroup, ...] | None = None
    pass_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How errors name this graph: the part and its bucket."""
        return f"part {self.name!r}" + (f" of bucket {self.bucket}" if self.bucket else "")

    def placeholders(self) -> list[fx.Node]:
        """Input nodes, in order."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    def output_nodes(self) -> list[fx.Node]:
        """All outputs, appended ones included."""
        result = self.module.graph.output_node().args[0]
        assert isinstance(result, tuple | list)
        return [node for node in result if isinstance(node, fx.Node)]

    def output_specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the part's own outputs."""
        return tuple(TensorSpec.of(node.meta["val"]) for node in self.output_nodes()[: self.num_outputs])

    def groups(self) -> tuple[str, ...]:
        """Names of the process groups the graph's collectives use, in order of first use."""
        if self.replica_groups is not None:
            return tuple(group.name for group in self.replica_groups)
        names = (group_name(node) for node in self.module.graph.nodes)
        return tuple(dict.fromkeys(name for name in names if name is not None))


def group_name(node: fx.Node) -> str | None:
    """The process group a node communicates over: the value of its operator's argument ``group_name``."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "group_name":
            value = node.args[index] if index < len(node.args) else node.kwargs.get("group_name")
            return None if value is None else str(value)
    return None


# Metadata nobody reads, and a mode that slows every operator; torch 2.9 and 2.10 do not have the switch.
_QUIET: dict[str, Any] = {"_disable_torch_fn_metadata_mode": True}
_QUIET = {name: value for name, value in _QUIET.items() if name in inspect.signature(make_fx).parameters}

TRACING = threading.RLock()
"""torch.fx keeps the tracer of a process in globals: one thread traces or lowers at a time."""


def capture(
    part: Part,
    specs: tuple[TensorSpec, ...],
    device: torch.device | str = "cpu",
    bucket: str = "",
    shared: SharedInputs | None = None,
) -> CapturedGraph:
    """Trace ``part`` with inputs of ``specs`` (one per ``part.inputs``).

    ``shared`` promises which inputs will share memory at every call; without it no input that is written may
    share memory with another. Nothing is allocated: weights may be on any device, ``meta`` included. Raises
    ``CompileError`` naming the part, the bucket and the source line for control flow that depends on data, for
    a tensor that is neither a parameter nor a buffer, and for a wrong number of outputs.
    """
    tensors = tensors_of(part.module)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    all_specs = (*(TensorSpec.of(tensor) for tensor in tensors.values()), *specs)
    shared = shared if shared is not None else SharedInputs()
    shared.check(all_specs)
    with mode:
        fakes = [spec.empty(device) for spec in all_specs]
    traced = _trace(part, tuple(tensors), mode, fakes, bucket)
    graph = CapturedGraph(
        part.name,
        traced,
        tuple(tensors),
        part.inputs,
        all_specs,
        mode,
        len(part.outputs),
        bucket=bucket,
        shared=shared,
    )
    _inline_constants(graph)
    for node, name in zip(graph.placeholders(), (*tensors, *part.inputs), strict=True):
        node.meta["input_name"] = name
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return graph


def _trace(
    part: Part, weights: tuple[str, ...], mode: FakeTensorMode, fakes: list[torch.Tensor], bucket: str
) -> fx.GraphModule:
    def call(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lifted = dict(zip(weights, flat, strict=False))
        with stateless._reparametrize_module(part.module, lifted, tie_weights=True):
            return part.run(list(flat[len(lifted) :]))

    try:
        with TRACING, _whole_stack_traces(), torch.no_grad(), mode:
            return make_fx(call, record_stack_traces=True, **_QUIET)(*fakes)
    except CompileError:
        raise
    except Exception as error:
        raise explain_failure(part, bucket, error) from error


def node_place(node: fx.Node) -> str:
    """``node (file:line: code)`` of the innermost line outside torch that made a node."""
    frames = str(node.meta.get("stack_trace") or "").split("\n")
    places: list[str] = []
    for index, frame in enumerate(frames):
        text = frame.strip()
        if text.startswith('File "') and not _is_machinery(text.split('"')[1]):
            line = text.split("line ")[1].split(",")[0]
            code = frames[index + 1].strip() if index + 1 < len(frames) else ""
            places.append(f"{text.split(chr(34))[1]}:{line}: {code}")
    return f"{node.name} ({places[-1]})" if places else node.name


@contextmanager
def _whole_stack_traces() -> Iterator[None]:
    """``make_fx`` keeps only frames called ``forward``; an error names the line that did it, wherever it is."""

    def user_frames(_: TracerBase, frames: traceback.StackSummary) -> traceback.StackSummary:
        first = next((index for index, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        kept = [frame for frame in frames[first:] if not _is_machinery(frame.filename)]
        return traceback.StackSummary.from_list(kept)

    with mock.patch.object(TracerBase, "_filter_traceback_frames", user_frames, create=True):
        yield


def _is_machinery(filename: str) -> bool:
    return filename.startswith((_TORCH, _OURS)) or filename.startswith("<")


def explain_failure(part: Part, bucket: str, error: Exception) -> CompileError:
    """``error``, raised while ``part`` ran on fake tensors, as one that names the part and the source line."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        if not _is_machinery(filename):
            place = f" at {filename}:{line}: {linecache.getline(filename, line).strip()}"
    where = f"part {part.name!r}" + (f" of bucket {bucket}" if bucket else "")
    return CompileError(f"{where} cannot be captured{place}: {_reason(error)}")


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    if kind.startswith(("DataDependent", "DynamicOutputShape", "GuardOnDataDependent")):
        return "control flow or a shape depends on tensor data, which a static graph cannot hold"
    if "convert all Tensors to FakeTensors" in str(error):
        return "it uses a tensor that is neither a parameter nor a buffer; register it with register_buffer"
    return f"{kind}: {str(error).splitlines()[0] if str(error) else ''}"


def _inline_constants(graph: CapturedGraph) -> None:
    """Scalars written as tensors (``x[0] = 2``) become ``full``; a larger constant is refused."""
    for node in list(graph.module.graph.nodes):
        if node.op not in ("get_attr", "call_module"):
            continue
        scalar = _scalar(getattr(graph.module, str(node.target), None))
        if scalar is None:
            raise CompileError(
                f"{graph.label} cannot be captured at {node_place(_first_user(node))}: it holds a tensor "
                "constant; build it with a factory such as torch.full or register it as a buffer"
            )
        value, dtype = scalar
        with graph.module.graph.inserting_before(node):
            full = graph.module.graph.call_function(
                torch.ops.aten.full.default, ([], value), {"dtype": dtype}
            )
        with graph.fake_mode:
            full.meta["val"] = torch.full([], value, dtype=dtype)
        full.meta["stack_trace"] = _first_user(node).meta.get("stack_trace")
        node.replace_all_uses_with(full)
        graph.module.graph.erase_node(node)


def _scalar(constant: Any) -> tuple[bool | int | float, torch.dtype] | None:
    """Value and dtype of a 0-d constant; inside a fake mode the real one hangs on the fake."""
    real = getattr(constant, "constant", None)
    real = constant if real is None else real
    if not isinstance(real, torch.Tensor) or isinstance(real, FakeTensor) or real.dim() or real.is_complex():
        return None
    return real.item(), real.dtype


def _first_user(node: fx.Node) -> Any:
    return next(iter(node.users), node)
