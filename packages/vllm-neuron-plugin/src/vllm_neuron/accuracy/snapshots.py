# SPDX-License-Identifier: Apache-2.0
"""Keeps the exact inputs of chosen steps' graphs, so that they can be run again without the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from vllm.logger import init_logger

from neuron_accuracy.errors import CaptureError
from neuron_accuracy.snapshots.store import CallRecord, bytes_of, changed_inputs, write_call
from neuron_core.errors import CompileError
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.compiled import Watch
from neuron_core.graphs.program import Part, Program, TensorSpec
from neuron_core.graphs.signature import tensors_of
from neuron_core.protocols import GraphCall
from vllm_neuron.accuracy.settings import SnapshotSettings
from vllm_neuron.runner.inputs import Batch

__all__ = ["SnapshotTaker"]

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class _Selected:
    bucket: str
    step: int
    rules: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Ran:
    before: Sequence[Tensor]
    """Copies of the inputs, weights first."""
    after: Sequence[Tensor]
    """The inputs, of which the call has written some."""
    results: Sequence[Tensor]


class SnapshotTaker:
    """One rank's snapshots. Steps are numbered from the first after the engine is ready."""

    def __init__(self, settings: SnapshotSettings, builder: GraphBuilder, *, rank: int) -> None:
        self._folder, self._spec = settings.folder, settings.spec
        self._builder = builder
        self._rank = rank
        self._step = -1
        self._taken = 0
        self._bytes = 0
        self.problem: str | None = None
        """Why it keeps no more, if it could not."""

    def watch(self, program: Program, batch: Batch, values: Mapping[str, Tensor]) -> Watch | None:
        """What is to run the graphs of the next step, or None if it is not kept."""
        self._step += 1
        tokens = tuple(values["token_ids"][: int(batch.starts[-1])].tolist())
        requests = tuple(request.request_id for request in batch.requests)
        rules = self._spec.selects(self._step, tokens, requests)
        if not rules or self._taken >= self._spec.max_snapshots or self.problem is not None:
            return None
        self._taken += 1
        selected = _Selected(batch.bucket.name, self._step, rules)

        def watch(index: int, call: GraphCall, inputs: list[Tensor]) -> Sequence[Tensor]:
            part = program.parts[index]
            wanted = self._spec.wants_part(part.name) and self._spec.wants_rank(self._rank)
            if not wanted or self.problem is not None:
                return call(inputs)
            kept = [tensor.clone() for tensor in inputs]
            results = call(list(inputs))
            try:
                self._take(part, selected, _Ran(kept, inputs, results))
            except (CaptureError, CompileError) as error:  # the engine goes on serving
                self.problem = str(error)
                logger.error("no snapshot is kept any more: %s", error)
            return results

        return watch

    def _take(self, part: Part, selected: _Selected, ran: _Ran) -> None:
        inputs = ran.after
        weights = tensors_of(part.module)
        specs = tuple(TensorSpec.of(tensor) for tensor in inputs[len(weights) :])
        graph = self._builder.capture(part, specs, selected.bucket)
        changed = changed_inputs(graph)
        size = bytes_of(inputs) + bytes_of([inputs[index] for index in changed])
        if self._bytes + size > self._spec.max_bytes:
            raise CaptureError(
                f"the snapshot of part {part.name!r} in step {selected.step} would bring rank {self._rank} to "
                f"{self._bytes + size} bytes, beyond input_snapshots.max_bytes={self._spec.max_bytes}; name fewer "
                "parts or steps, a smaller cache (--num-gpu-blocks-override), or "
                f"max_bytes={self._bytes + size} and more"
            )
        self._bytes += size
        outputs = {f"output.{index}": tensor for index, tensor in enumerate(ran.results)}
        outputs.update({f"input.{index}": inputs[index] for index in changed})
        groups = graph.replica_groups or ()
        record = CallRecord(
            part.name,
            selected.bucket,
            selected.step,
            self._rank,
            self._builder.compiler.name,
            selected.rules,
            (*weights, *part.inputs),
            len(weights),
            changed,
            max((len(group.ranks) for group in groups), default=1),
        )
        folder = self._folder / f"step{selected.step}" / part.name / f"rank{self._rank}"
        write_call(folder, graph, record, ran.before, outputs)
