# SPDX-License-Identifier: Apache-2.0
"""What may look into steps and change what passes through modules; an engine has one only if its settings ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from neuron_core.graphs.compiled import Watch
from neuron_core.graphs.taps import TappedProgram, Taps
from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.requests import Request, RequestTable

__all__ = ["StepObserver"]


class StepObserver(Protocol):
    """Called on the stream that runs the steps, in their order."""

    taps: Taps
    """What of the model's programs is tapped, and may be put."""

    def puts(
        self, program: TappedProgram, batch: Batch, values: Mapping[str, Tensor], table: RequestTable
    ) -> Mapping[str, Tensor]:
        """Every input that the puts of ``program`` add, for a step with these inputs."""
        ...

    def watch(self, program: TappedProgram, batch: Batch, values: Mapping[str, Tensor]) -> Watch | None:
        """What runs each graph of a step with these inputs; None leaves it to the executor. Called once a step."""
        ...

    def ran(
        self,
        program: TappedProgram,
        batch: Batch,
        values: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        table: RequestTable,
    ) -> None:
        """Take what a step's graph gave."""
        ...

    def ended(self, table: RequestTable, requests: Sequence[Request], caches: Sequence[Tensor]) -> None:
        """Requests end: their blocks, which hold what was computed, are no longer theirs after this.

        ``caches`` has each layer's ``[num_blocks, kv_heads, block_size, 2 * head_dim]``.
        """
        ...

    def preempted(self, request_ids: Sequence[str]) -> None:
        """Requests lose what was computed for them, and will start again."""
        ...

    def check(self) -> None:
        """Raise ``ConfigError`` if it asks for what no program has; called when all are made."""
        ...

    def close(self) -> str | None:
        """Nothing comes any more; returns why it had stopped before, if it had."""
        ...
