# SPDX-License-Identifier: Apache-2.0
"""Any module as a cached artifact: ``compile(module, example_inputs)``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from neuron_core.devices.cpu import CpuDevice
from neuron_core.environ import Environment
from neuron_core.errors import CompileError
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.capture import SharedInputs, explain_failure
from neuron_core.graphs.compilers import compiler_named
from neuron_core.graphs.configured import configured_cache
from neuron_core.graphs.passes import shared_inputs
from neuron_core.graphs.program import Part, Program, TensorSpec
from neuron_core.graphs.signature import tensors_of

if TYPE_CHECKING:
    from neuron_core.graphs.compiled import CompiledProgram
    from neuron_core.protocols import Compiler

__all__ = ["CompiledModule", "compile"]


class CompiledModule:
    """A module compiled for inputs of fixed shapes; call it with tensors like the examples.

    Weights are the module's own and read at every call, so writing into one has effect; inputs that the module
    changes are changed in place. ``key``, ``path`` and ``from_cache`` say which artifact serves it.
    """

    def __init__(
        self, program: CompiledProgram, specs: Sequence[TensorSpec], shared: SharedInputs, is_tuple: bool
    ) -> None:
        self._program = program
        self._specs = tuple(specs)
        self._shared = shared
        self._is_tuple = is_tuple
        self._names = tuple(f"input.{index}" for index in range(len(specs)))
        graph = program.graphs[0]
        self.key = graph.key
        self.path = graph.path
        self.from_cache = not graph.compiled

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run it.

        Raises ``CompileError`` naming an input whose shape, dtype or stride is not the example's, and when inputs
        share memory in another way than the examples.
        """
        if len(inputs) != len(self._specs):
            raise CompileError(f"compiled for {len(self._specs)} inputs, called with {len(inputs)}")
        for index, (tensor, spec) in enumerate(zip(inputs, self._specs, strict=True)):
            if TensorSpec.of(tensor) != spec:
                raise CompileError(
                    f"input {index} is {TensorSpec.of(tensor)}, the graph was compiled for {spec}; pass a tensor "
                    "of that shape, dtype and stride, or compile again"
                )
        if len(inputs) > 1 and shared_inputs(inputs) != self._shared:
            raise CompileError(
                "inputs share memory in another way than the examples did: pass tensors that share it alike, "
                "or compile again"
            )
        outputs = tuple(self._program(dict(zip(self._names, inputs, strict=True))).values())
        return outputs if self._is_tuple else outputs[0]


def compile(
    module: nn.Module,
    example_inputs: Sequence[torch.Tensor],
    *,
    compiler: str | Compiler = "inductor",
    cache_dir: Path | str | None = None,
    name: str | None = None,
    require_compiled: bool = False,
) -> CompiledModule:
    """Compile ``module`` for inputs like ``example_inputs``, or load what an earlier process compiled.

    The module must be traceable as one graph: no control flow on tensor data, tensors only as inputs, a tensor or a
    tuple of tensors as result, every tensor it uses a parameter, a buffer or an input. ``example_inputs`` give
    shape, dtype and stride, and which of them share memory; meta tensors do. ``compiler`` is ``inductor``, ``fx``
    or an object with the interface :class:`neuron_core.protocols.Compiler`. ``cache_dir`` defaults to
    ``VLLM_NEURON_CACHE_DIR``.

    Raises ``CompileError`` naming the module and the source line that cannot be captured, or, with
    ``require_compiled``, the graph that the cache lacks; ``ConfigError`` for an unknown compiler.
    """
    cache = configured_cache(Environment.read(), None if cache_dir is None else Path(cache_dir))
    chosen = compiler_named(compiler, cache.toolchain_dir) if isinstance(compiler, str) else compiler
    specs = tuple(TensorSpec.of(tensor) for tensor in example_inputs)
    names = tuple(f"input.{index}" for index in range(len(specs)))
    label = name or type(module).__name__
    count, is_tuple = _count_outputs(Part(label, module, names, ("output",)), specs)
    weights = list(tensors_of(module).values())
    memory = shared_inputs([*weights, *example_inputs])
    part = Part(
        label,
        module,
        names,
        tuple(f"output.{index}" for index in range(count)),
        same_as=tuple(memory.same_as.items()),
        overlaps=memory.overlaps,
    )
    builder = GraphBuilder(CpuDevice(), chosen, cache, jobs=1, require_compiled=require_compiled)
    try:
        built = builder.build(Program((part,), part.outputs), dict(zip(names, specs, strict=True)))
    finally:
        builder.close()
    return CompiledModule(built, specs, shared_inputs(example_inputs), is_tuple)


def _count_outputs(part: Part, specs: Sequence[TensorSpec]) -> tuple[int, bool]:
    """How many tensors the module returns, and whether in a tuple; it runs once on fake tensors."""
    with FakeTensorMode(), torch.no_grad():
        weights = {
            name: TensorSpec.of(tensor).empty("cpu") for name, tensor in tensors_of(part.module).items()
        }
        inputs = tuple(spec.empty("cpu") for spec in specs)
        try:
            result = torch.func.functional_call(part.module, weights, inputs, tie_weights=True)
        except Exception as error:
            raise explain_failure(part, "", error) from error
    return (len(result), True) if isinstance(result, tuple | list) else (1, False)
