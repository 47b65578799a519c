# SPDX-License-Identifier: Apache-2.0
"""Whether a model and one request fit a rank, from shapes alone: asked before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from neuron_core.devices.base import Device
from neuron_core.errors import CapacityError
from neuron_core.kv.layout import KVLayout
from neuron_core.kv.slots import blocks_for
from neuron_core.memory import (
    DEFAULT_RESERVE_BYTES,
    MemoryBudget,
    bytes_per_block,
    format_bytes,
    format_rows,
    module_bytes,
)

__all__ = ["Footprint", "StartEstimate"]


@dataclass(frozen=True)
class Footprint:
    """What one rank of a model takes, in bytes.

    ``packing_bytes`` is the copy that exists while the device brings the largest weight into its own form;
    ``activation_bytes`` is headroom for one step's intermediate tensors.
    """

    weights_bytes: int
    packing_bytes: int
    layouts: tuple[KVLayout, ...]
    activation_bytes: int = 0

    @classmethod
    def of(
        cls, module: nn.Module, layouts: Sequence[KVLayout], device: Device, activation_bytes: int = 0
    ) -> Footprint:
        """The footprint of a model made on the meta device; ``device`` prepares it as it would the real one."""
        before = list(module.parameters())
        device.prepare(module)
        kept = {id(parameter) for parameter in module.parameters()}
        replaced = (parameter.nbytes for parameter in before if id(parameter) not in kept)
        return cls(module_bytes([module]), max(replaced, default=0), tuple(layouts), activation_bytes)


@dataclass(frozen=True)
class StartEstimate:
    """A rank's memory as it will be once ``footprint`` is loaded; sizes in bytes.

    ``total_bytes`` and ``free_bytes`` are this rank's share **before** loading. ``num_blocks`` and
    ``requested_kv_bytes`` are vLLM's ``--num-gpu-blocks-override`` and ``--kv-cache-memory-bytes``.
    """

    footprint: Footprint
    total_bytes: int
    free_bytes: int
    utilization: float
    max_model_len: int
    tensor_parallel_size: int = 1
    num_blocks: int | None = None
    requested_kv_bytes: int | None = None
    reserve_bytes: int = DEFAULT_RESERVE_BYTES

    @property
    def loading_bytes(self) -> int:
        """What must be free for loading alone: the weights, the copy made while packing, the reserve."""
        return self.footprint.weights_bytes + self.footprint.packing_bytes + self.reserve_bytes

    @property
    def request_blocks(self) -> int:
        """Blocks of one request of ``max_model_len`` tokens, and the null block; none without a cache."""
        if not self.footprint.layouts:
            return 0
        block_size = min(layout.block_size for layout in self.footprint.layouts)
        return blocks_for(self.max_model_len, block_size) + 1

    @property
    def request_bytes(self) -> int:
        """Bytes of ``request_blocks`` in all layers."""
        return self.request_blocks * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        layouts = self.footprint.layouts
        return bytes_per_block(layouts) if layouts else 0

    def budget(self) -> MemoryBudget:
        """The budget expected after loading; raises as ``MemoryBudget`` does."""
        footprint = self.footprint
        return MemoryBudget(
            total_bytes=self.total_bytes,
            free_bytes=self.free_bytes - footprint.weights_bytes,
            utilization=self.utilization,
            weights_bytes=footprint.weights_bytes,
            activation_bytes=footprint.activation_bytes,
            reserve_bytes=self.reserve_bytes,
            requested_kv_bytes=self.requested_kv_bytes,
        )

    def fits(self) -> bool:
        """Whether ``require_fit`` would return."""
        try:
            self._require()
        except CapacityError:
            return False
        return True

    def require_fit(self, others: Iterable[Callable[[], StartEstimate]] = ()) -> None:
        """Raise ``CapacityError`` unless the weights, and beside them one request, fit this rank.

        The message says by how much, and which ``--max-model-len``, ``--gpu-memory-utilization`` or
        ``--tensor-parallel-size`` works. ``others`` make the estimates of larger degrees, in order; they are asked
        only when this one does not fit.
        """
        try:
            self._require()
        except CapacityError as error:
            text, _, table = str(error).partition("\n")
            raise CapacityError(f"{text}\n{self._degrees(others)}\n{table or self.table()}") from error

    def table(self) -> str:
        """Every term of the estimate as a table for the log."""
        footprint = self.footprint
        shown = format_bytes
        rows = [
            ("total (this rank's share)", shown(self.total_bytes)),
            ("free now", shown(self.free_bytes)),
            (f"weights (1/{self.tensor_parallel_size} of the model)", shown(footprint.weights_bytes)),
            ("copy while packing the largest weight", shown(footprint.packing_bytes)),
            ("activation headroom", shown(footprint.activation_bytes)),
            ("reserve", shown(self.reserve_bytes)),
            ("free with weights loaded", shown(self.free_bytes - footprint.weights_bytes)),
            ("KV cache of one block", shown(self._block_bytes)),
            (
                f"one request of {self.max_model_len} tokens ({self.request_blocks} blocks)",
                shown(self.request_bytes),
            ),
        ]
        if self.num_blocks is not None:
            size = self.num_blocks * self._block_bytes
            rows.append((f"--num-gpu-blocks-override {self.num_blocks}", shown(size)))
        if self.requested_kv_bytes is not None:
            rows.append(("--kv-cache-memory-bytes", shown(self.requested_kv_bytes)))
        return format_rows("Memory estimate before loading:", rows)

    def _require(self) -> None:
        footprint = self.footprint
        if self.loading_bytes > self.free_bytes:
            missing = format_bytes(self.loading_bytes - self.free_bytes)
            raise CapacityError(
                f"The weights do not fit: this rank needs {format_bytes(self.loading_bytes)} to load them "
                f"({format_bytes(footprint.weights_bytes)} of weights, {format_bytes(footprint.packing_bytes)} "
                f"while packing the largest, {format_bytes(self.reserve_bytes)} reserve) and has "
                f"{format_bytes(self.free_bytes)} free: short by {missing}. No --max-model-len or "
                f"--gpu-memory-utilization helps; free memory or use a smaller model."
            )
        if footprint.layouts:
            self.budget().require_one_request(self.max_model_len, footprint.layouts, self.num_blocks)
        else:
            self._require_step()

    def _require_step(self) -> None:
        """Raise ``CapacityError`` unless, without a cache, the tensors of a step fit beside the weights."""
        footprint = self.footprint
        needs = footprint.weights_bytes + footprint.activation_bytes + self.reserve_bytes
        if needs > self.free_bytes:
            raise CapacityError(
                f"One step does not fit: with {format_bytes(footprint.weights_bytes)} of weights it needs "
                f"{format_bytes(needs)}, and {format_bytes(self.free_bytes)} are free: short by "
                f"{format_bytes(needs - self.free_bytes)}. Lower --max-num-batched-tokens or --max-model-len."
            )

    def _degrees(self, others: Iterable[Callable[[], StartEstimate]]) -> str:
        for other in others:
            estimate = other()
            if estimate.fits():
                return f"--tensor-parallel-size {estimate.tensor_parallel_size} works."
        return "No other --tensor-parallel-size works here."
