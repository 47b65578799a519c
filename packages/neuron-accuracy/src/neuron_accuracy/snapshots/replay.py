# SPDX-License-Identifier: Apache-2.0
"""Running a stored call again: its graph through any compiler, without the engine or the model that made it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from neuron_accuracy.errors import SubjectError
from neuron_accuracy.findings import Finding, Level, Outcome
from neuron_accuracy.snapshots.store import StoredCall, is_equal, read_call
from neuron_core import ops
from neuron_core.devices.cpu import CpuDevice
from neuron_core.environ import Environment
from neuron_core.errors import CompileError
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers import compiler_named
from neuron_core.graphs.compilers.fx import load_graph_source
from neuron_core.graphs.program import Part, Program, TensorSpec
from neuron_core.protocols import Compiler

__all__ = ["LIMITS", "replay", "replay_call"]

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative L2 difference between two compilers of one graph, by dtype: a few roundings of its last digit,
which sums in another order differ by. Whole numbers, and what ``fx`` had run and runs again, must be equal.
"""
EIGHT_BIT_LIMIT = 0.05


class _StoredGraph(nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._call = load_graph_source(folder)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._call(list(inputs)))


def replay_call(call: StoredCall, compiler: Compiler, cache: CompileCache) -> dict[str, Tensor]:
    """What the call gives when ``compiler`` compiles its graph: ``output.<i>``, and ``input.<i>`` of what it writes.

    Raises ``SubjectError`` for a graph that communicates with other ranks, ``CompileError`` as compiling does.
    """
    if call.record.ranks > 1:
        raise SubjectError(
            f"{call.folder}: part {call.record.part!r} communicates with {call.record.ranks - 1} other ranks, which a "
            "replay has not; keep parts of an engine with tensor_parallel_size=1"
        )
    names = tuple(f"input.{index}" for index in range(len(call.inputs)))
    count = sum(name.startswith("output.") for name in call.outputs)
    outputs = tuple(f"output.{index}" for index in range(count))
    program = Program((Part(call.record.part, _StoredGraph(call.folder), names, outputs),), outputs)
    values = {name: tensor.clone() for name, tensor in zip(names, call.inputs, strict=True)}
    builder = GraphBuilder(CpuDevice(), compiler, cache)
    compiled = builder.build(program, {name: TensorSpec.of(tensor) for name, tensor in values.items()})
    with torch.no_grad():
        given = compiled(values)
    builder.close()
    return {**given, **{f"input.{index}": values[f"input.{index}"] for index in call.record.changed}}


def replay(
    folders: Sequence[Path], compiler_name: str, *, progress: Callable[[int], None] = lambda done: None
) -> Outcome:
    """Run every stored call through a compiler and hold what it gives against what the engine's graph gave.

    ``progress(done)`` is called after each. Data: ``calls``, a row per tensor that came out.
    """
    ops.load_kernels(
        Environment.read().cache_dir
    )  # the engine's, or the reference's roundings would be compared
    findings: list[Finding] = []
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="neuron-accuracy-replay-") as scratch:
        cache = CompileCache(Path(scratch))
        compiler = compiler_named(compiler_name, cache.toolchain_dir)
        for index, folder in enumerate(folders):
            call = read_call(folder)
            try:
                given = replay_call(call, compiler, cache)
            except CompileError as error:
                findings.append(Finding(Level.TENSOR, "does not compile", _where(call), str(error)))
                continue
            exact = call.record.compiler == compiler_name == "fx"
            for name, expected in call.outputs.items():
                row, finding = _held(call, name, given[name], expected, exact)
                rows.append(row)
                findings += [finding] if finding is not None else []
            progress(index + 1)
    return Outcome(
        "replay",
        "Replay of stored calls",
        f"{len(folders)} calls through {compiler_name}",
        "what the engine's graphs gave",
        findings,
        {"compiler": compiler_name, "calls": rows},
    )


def _held(
    call: StoredCall, name: str, found: Tensor, expected: Tensor, exact: bool
) -> tuple[dict[str, object], Finding | None]:
    equal = is_equal(found, expected)
    relative, elsewhere = _apart(found, expected)
    exact = exact or not expected.is_floating_point()
    limit = 0.0 if exact else LIMITS.get(expected.dtype, EIGHT_BIT_LIMIT)
    row: dict[str, object] = {
        "step": call.record.step,
        "part": call.record.part,
        "tensor": name,
        "shape": list(expected.shape),
        "dtype": str(expected.dtype).removeprefix("torch."),
        "equal": equal,
        "relative_l2": relative,
        "not_finite_elsewhere": elsewhere,
        "limit": limit,
    }
    if equal or (not exact and not elsewhere and relative <= limit):
        return row, None
    detail = f"relative L2 {relative:.3g} from what {call.record.compiler} gave, limit {limit:g}"
    if elsewhere:
        detail = f"{elsewhere} of {expected.numel()} values are not finite on one side alone, or otherwise; {detail}"
    where = f"{_where(call)}: {name}"
    figures = {"relative_l2": relative, "limit": limit}
    return row, Finding(
        Level.TENSOR, "not finite" if elsewhere else "diverges", where, detail, figures=figures
    )


def _apart(found: Tensor, expected: Tensor) -> tuple[float, int]:
    """Relative L2 difference where both are finite, and how many others are not the same NaN or infinity.

    Infinite for another shape or dtype.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf"), 0
    wide, reference = found.double(), expected.double()
    finite = wide.isfinite() & reference.isfinite()
    same = torch.isclose(wide, reference, rtol=0, atol=0, equal_nan=True)
    distance, norm = float((wide - reference)[finite].norm()), float(reference[finite].norm())
    return distance / norm if norm else distance, int((~finite & ~same).sum())


def _where(call: StoredCall) -> str:
    return f"step {call.record.step} ({call.record.bucket}), part {call.record.part}, rank {call.record.rank}"
