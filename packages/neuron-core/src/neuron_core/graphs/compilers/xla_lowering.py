# SPDX-License-Identifier: Apache-2.0
"""The program that turns a captured graph into HLO with torch_xla; runs in a process of its own.

``python -m neuron_core.graphs.compilers.xla_lowering FOLDER`` reads what ``write_captured`` wrote and adds
``graph.hlo.pb`` (a serialized ``HloModuleProto``) and ``hlo.json``. Without a folder it only says whether torch_xla is
there. A process of its own because torch_xla claims a device when it starts, keeps what it traces, and is chosen by
an environment variable.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from neuron_core.environ import export
from neuron_core.errors import CacheError, CompileError
from neuron_core.graphs.compilers.captured import CapturedFiles, graph_function
from neuron_core.graphs.compilers.static_ops import STATIC_FORMS

__all__ = ["EXIT_FAILED", "EXIT_MISSING", "HLO_FACTS_FILE", "HLO_FILE", "alias_field", "main"]

HLO_FILE = "graph.hlo.pb"
HLO_FACTS_FILE = "hlo.json"

EXIT_FAILED = 3
EXIT_MISSING = 4

MINIMUM = (2, 0)
"""Of torch_xla; a placeholder would be older."""


def main(arguments: Sequence[str]) -> int:
    """Lower one folder; prints one line, the version of torch_xla or what is wrong, and returns the exit status."""
    export({"PJRT_DEVICE": "CPU"})
    try:
        version = _load()
        if arguments:
            _lower(Path(arguments[0]), version)
    except ImportError as error:
        print(" ".join(str(error).split()) or type(error).__name__)
        return EXIT_MISSING
    except (CompileError, CacheError) as error:
        print(" ".join(str(error).split()))
        return EXIT_FAILED
    print(version)
    return 0


def _load() -> str:
    """Import torch_xla; returns its version. Raises ``ImportError`` when it is missing, broken or a placeholder."""
    try:
        module = importlib.import_module("torch_xla")
    except (OSError, RuntimeError, AttributeError) as error:
        raise ImportError(f"torch_xla cannot be imported: {error}") from error
    version = getattr(module, "__version__", None)
    release = tuple(int(part) for part in str(version).split(".")[:2] if part.isdecimal())
    if not hasattr(getattr(module, "_XLAC", None), "lowering") or release < MINIMUM:
        raise ImportError(f"torch_xla {version} is a placeholder: it has no lowering")
    return str(version)


def _lower(folder: Path, version: str) -> None:
    captured = CapturedFiles.read(folder)
    xla = _Xla(_flat(folder, captured), captured)
    hlo, numbers, constants = xla.lower()
    aliases = [(output, numbers[index]) for output, index in captured.metadata.io_map if numbers[index] >= 0]
    count = sum(number >= 0 for number in numbers) + len(constants)
    facts = {
        "torch_xla": version,
        "parameters": [numbers.index(number) if number in numbers else -1 for number in range(count)],
        "constants": {
            str(number): {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
            for number, value in constants.items()
        },
        "num_outputs": captured.metadata.num_outputs + len(captured.metadata.io_map),
        "aliases": aliases,
    }
    (folder / HLO_FILE).write_bytes(hlo + alias_field(aliases))
    (folder / HLO_FACTS_FILE).write_text(json.dumps(facts, indent=1))


def _flat(folder: Path, captured: CapturedFiles) -> fx.GraphModule:
    """The graph with our ops replaced by operators of PyTorch's own."""
    function = graph_function(folder)
    for spec in captured.specs:
        if spec.layout != "strided":
            raise CompileError(f"an input has the layout {spec.layout}, which only the CPU device knows")
    try:
        with torch.no_grad(), FakeTensorMode():
            fakes = [spec.empty("cpu") for spec in captured.specs]
            return make_fx(lambda *inputs: function(None, *inputs), decomposition_table=STATIC_FORMS)(*fakes)
    except Exception as error:
        raise CompileError(f"it has no static form: {type(error).__name__}: {error}") from error


class _Xla(fx.Interpreter):
    """Runs a graph's operators on the XLA device, which records them instead of computing."""

    def __init__(self, module: fx.GraphModule, captured: CapturedFiles) -> None:
        super().__init__(module)
        self.extra_traceback = False  # it would rewrite the messages of our own errors
        torch_xla: Any = importlib.import_module("torch_xla")
        self._c: Any = torch_xla._XLAC
        self._metrics: Any = importlib.import_module("torch_xla.debug.metrics")
        self._device: torch.device = torch_xla.device()
        self._captured = captured
        self._current = ""

    def run_node(self, n: fx.Node) -> Any:
        """One node; remembered to name it when it fails."""
        self._current = str(n.target)
        return super().run_node(n)

    def lower(self) -> tuple[bytes, list[int], dict[int, torch.Tensor]]:
        """The HLO module, the parameter number of each input (-1: not read), and parameters of constant value.

        torch_xla turns a few numbers, such as the token that orders collectives, into parameters.
        Raises ``CompileError`` when an operator has no XLA form, when part of the graph was computed here instead
        of recorded, and when a constant parameter is more than a number.
        """
        self._c._set_xla_all_numbers_special_scalars(True)  # a number is a constant, not another input
        inputs = [torch.zeros(spec.shape, dtype=spec.dtype).to(self._device) for spec in self._captured.specs]
        self._metrics.clear_all()
        try:
            with torch.no_grad():
                results = [result.to(self._device) for result in self.run(*inputs)]
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(
                f"torch_xla cannot lower {self._current}: {type(error).__name__}: {error}"
            ) from error
        missing = sorted(self._c._get_executed_fallback_ops())
        if missing:
            raise CompileError(f"XLA has no form of {', '.join(missing)}")
        if self._metrics.metric_data("ExecuteTime") is not None:
            raise CompileError("a shape or a branch depends on tensor data, which HLO cannot hold")
        context = self._c.lowering.LoweringContext("graph")
        context.build(results)
        numbers = [int(context.tensor_parameter_id(tensor)) for tensor in inputs]
        values = context.parameter_id_tensor_mapping() if self._has_extra(context, numbers) else {}
        constants = {number: value for number, value in values.items() if number not in numbers}
        large = [tuple(value.shape) for value in constants.values() if value.numel() != 1]
        if large:
            raise CompileError(
                f"the HLO has parameters of the shapes {large} that are no inputs of the graph"
            )
        return context.hlo(), numbers, constants

    def _has_extra(self, context: Any, numbers: list[int]) -> bool:
        return not set(context.device_parameter_id_tensor_mapping()) <= set(numbers)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator; devices move to XLA, collectives take their ranks, a foreign operator is refused."""
        namespace = getattr(target, "namespace", "aten")
        if namespace == "_c10d_functional":
            return self._collective(target, args)
        if namespace not in ("aten", "prims", "prim"):
            forms = ", ".join(sorted(str(op) for op in STATIC_FORMS))
            raise CompileError(f"{target} has no static form to lower; there is one of {forms}")
        args, kwargs = tree_map(self._moved, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _moved(self, value: Any) -> Any:
        return self._device if isinstance(value, torch.device) else value

    def _collective(self, target: Any, args: tuple[Any, ...]) -> torch.Tensor:
        name = target.overloadpacket.__name__
        if name == "wait_tensor":
            return args[0]  # type: ignore[no-any-return]
        ranks = self._captured.groups[str(args[-1])]
        if ranks != list(range(len(ranks))):
            raise CompileError(f"{name} over the ranks {ranks}: only consecutive ranks can be lowered")
        if name not in _COLLECTIVES:
            raise CompileError(f"{name} has no lowering; there is one of {', '.join(_COLLECTIVES)}")
        return _COLLECTIVES[name](self._c, args, ranks)


def _all_reduce(c: Any, args: tuple[Any, ...], ranks: list[int]) -> torch.Tensor:
    return c._xla_all_reduce(args[1], args[0], 1.0, [ranks], False)  # type: ignore[no-any-return]


def _all_gather(c: Any, args: tuple[Any, ...], ranks: list[int]) -> torch.Tensor:
    return c._xla_all_gather(args[0], 0, len(ranks), [ranks], False, None, None)  # type: ignore[no-any-return]


def _reduce_scatter(c: Any, args: tuple[Any, ...], ranks: list[int]) -> torch.Tensor:
    token = c._get_all_reduce_token(c._xla_get_default_device())
    result, _ = c._xla_reduce_scatter(args[1], args[0], token, 1.0, 0, len(ranks), [ranks], False, None, None)
    return result  # type: ignore[no-any-return]


_COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
}
"""Functional collectives by name, as the XLA operators that take the ranks themselves."""


def alias_field(aliases: Sequence[tuple[int, int]]) -> bytes:
    """``input_output_alias`` of an ``HloModuleProto`` (openxla/xla: xla/service/hlo.proto), to append to a module.

    ``aliases`` are pairs of output and parameter number. A protobuf message is a sequence of fields, so a field
    that is missing may be appended. The outputs are one flat tuple; the kind is MAY_ALIAS.
    """
    entries = b""
    for output, parameter in aliases:
        entry = (
            _field(1, _varint(output), packed=True) + _field(2, _varint(parameter)) + _field(4, _varint(1))
        )
        entries += _field(1, entry, packed=True)
    return _field(8, entries, packed=True) if entries else b""


def _field(number: int, payload: bytes, packed: bool = False) -> bytes:
    """One field: a varint, or with ``packed`` length-delimited bytes."""
    tag = _varint(number << 3 | (2 if packed else 0))
    return tag + (_varint(len(payload)) if packed else b"") + payload


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
