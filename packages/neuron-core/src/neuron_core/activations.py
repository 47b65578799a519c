# SPDX-License-Identifier: Apache-2.0
"""How much memory one step takes beside weights and cache, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import stateless
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neuron_core.graphs.buckets import Bucket, BucketPlan, Phase
from neuron_core.graphs.build import Specs
from neuron_core.graphs.capture import TRACING
from neuron_core.graphs.model_programs import ModelPrograms, variants
from neuron_core.graphs.program import KV_PREFIX, Part, Program, TensorSpec
from neuron_core.graphs.signature import structural_signature, tensors_of
from neuron_core.protocols import StaticModel

__all__ = ["activation_bytes", "program_bytes"]


def activation_bytes(model: StaticModel, plan: BucketPlan) -> int:
    """An upper bound of the bytes of one step's tensors: of all inputs, values and intermediates it makes.

    The step is the largest of each phase. What it returns is counted twice, because the step before may still be
    read. ``model`` may be on the meta device; nothing is allocated. Scratch that a kernel takes inside is not seen.
    """
    programs = ModelPrograms(model, plan, num_blocks=1)
    return max(
        program_bytes(programs.program(bucket, variant), programs.specs(bucket))
        for bucket in _largest(plan)
        for variant in variants(bucket)
    )


def program_bytes(program: Program, specs: Specs) -> int:
    """The same for one program with inputs of ``specs``, of which cache tensors do not count."""
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    peak = 0
    known: dict[tuple[object, ...], tuple[int, tuple[torch.Tensor, ...]]] = {}
    with TRACING, torch.no_grad(), mode:
        values = {name: _spec(spec).empty("cpu") for name, spec in specs.items()}
        cache = {name: value for name, value in values.items() if name.startswith(KV_PREFIX)}
        for part in program.parts:
            inputs = [values[name] for name in part.inputs]
            alive = _size(values.values()) - _size(cache.values())
            key = _key(part, inputs)
            if key not in known:
                known[key] = _run(part, inputs)
            made, outputs = known[key]
            peak = max(peak, alive + made)
            values.update(zip(part.outputs, outputs, strict=True))
        return peak + _size(values[name] for name in program.outputs)


class _Made(TorchDispatchMode):
    """Keeps every tensor that an operator returns, so that no two of them have one identity."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


def _run(part: Part, inputs: list[torch.Tensor]) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Bytes of the storages that ``part`` makes, and its outputs."""
    weights = {name: TensorSpec.of(tensor).empty("cpu") for name, tensor in tensors_of(part.module).items()}
    with stateless._reparametrize_module(part.module, weights, tie_weights=True), _Made() as made:
        outputs = part.run(inputs)
    given = [*inputs, *weights.values()]
    return _size([*made.tensors, *given]) - _size(given), outputs


def _size(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all storages, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _key(part: Part, inputs: list[torch.Tensor]) -> tuple[object, ...]:
    """Equal for parts that make the same tensors."""
    same = structural_signature(part.module) or id(part.module)
    return (same, part.static, part.shared, *(TensorSpec.of(tensor) for tensor in inputs))


def _spec(spec: Any) -> TensorSpec:
    return spec if isinstance(spec, TensorSpec) else TensorSpec.contiguous(*spec)


def _largest(plan: BucketPlan) -> list[Bucket]:
    """Of each phase the bucket with most tokens, and of those the one with the longest context."""
    sizes = plan.all()
    return [
        max((b for b in sizes if b.phase is phase), key=lambda b: (b.num_tokens, b.context_len))
        for phase in Phase
        if any(b.phase is phase for b in sizes)
    ]
