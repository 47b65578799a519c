# SPDX-License-Identifier: Apache-2.0
"""Capture of one part on fake tensors: one ATen graph, no breaks, weights lifted to inputs."""

from __future__ import annotations

import linecache
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import stateless

from neuron_core.errors import CompileError
from neuron_core.graphs.program import Part, TensorSpec
from neuron_core.graphs.signature import tensors_of

__all__ = ["CapturedGraph", "capture", "node_place"]

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)


@dataclass
class CapturedGraph:
    """A captured part and what the passes learn about it.

    Placeholders are ``[*weights, *inputs]``; the output is a flat tuple of which the first ``num_outputs``
    are the part's own. ``io_map`` maps an appended output to the input whose new value it is; before alias
    analysis it is empty. ``groups`` are the process groups reached, in order of first use.
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
        found: dict[str, None] = {}
        for node in self.module.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or schema is None or not node.target.namespace.startswith("_c10d"):
                continue
            for argument, value in zip(schema.arguments, node.args, strict=False):
                if argument.name == "group_name":
                    found[str(value)] = None
        return tuple(found)


TRACING = threading.RLock()
"""torch.fx keeps the tracer of a process in globals: one thread traces or lowers at a time."""


def capture(
    part: Part, specs: tuple[TensorSpec, ...], device: torch.device | str = "cpu", bucket: str = ""
) -> CapturedGraph:
    """Trace ``part`` with inputs of ``specs`` (one per ``part.inputs``).

    Nothing is allocated: weights may be on any device, ``meta`` included. Raises ``CompileError`` naming the
    part, the bucket and the source line for control flow that depends on data, for a tensor that is neither a
    parameter nor a buffer, and for a wrong number of outputs.
    """
    module = part.module
    tensors = tensors_of(module)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    all_specs = (*(TensorSpec.of(tensor) for tensor in tensors.values()), *specs)
    with mode:
        fakes = [spec.empty(device) for spec in all_specs]

    def call(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lifted = dict(zip(tensors, flat, strict=False))
        with stateless._reparametrize_module(module, lifted, tie_weights=True):
            return part.run(list(flat[len(lifted) :]))

    try:
        with TRACING, torch.no_grad(), mode:
            traced = make_fx(call, record_stack_traces=True, _disable_torch_fn_metadata_mode=True)(*fakes)
    except CompileError:
        raise
    except Exception as error:
        raise _explain(part, bucket, error) from error
    graph = CapturedGraph(
        part.name, traced, tuple(tensors), part.inputs, all_specs, mode, len(part.outputs), bucket=bucket
    )
    _inline_constants(graph)
    for node, name in zip(graph.placeholders(), (*tensors, *part.inputs), strict=True):
        node.meta["input_name"] = name
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return graph


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


def _is_machinery(filename: str) -> bool:
    return filename.startswith((_TORCH, _OURS)) or filename.startswith("<")


def _explain(part: Part, bucket: str, error: Exception) -> CompileError:
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
