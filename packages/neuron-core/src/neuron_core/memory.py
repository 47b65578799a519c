# SPDX-License-Identifier: Apache-2.0
"""How much memory the KV cache gets, as arithmetic whose every term can be logged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from neuron_core.devices.base import Device
from neuron_core.errors import CapacityError, ConfigError
from neuron_core.kv.layout import KVLayout
from neuron_core.kv.slots import blocks_for

__all__ = [
    "DEFAULT_KV_CAP_FRACTION",
    "DEFAULT_RESERVE_BYTES",
    "MemoryBudget",
    "bytes_per_block",
    "format_bytes",
    "format_rows",
    "module_bytes",
    "tensor_bytes",
]

MIB = 1024**2

DEFAULT_KV_CAP_FRACTION = 0.30
"""Largest part of a rank's memory the KV cache takes, so that a shared host is not eaten."""

DEFAULT_RESERVE_BYTES = 256 * MIB
"""Memory left for what is not counted elsewhere: the interpreter, compiled code, allocator slack."""

# The block count is part of every graph's shape. Where momentary free memory decides it, it is rounded down
# to this part of the total, so that a second start usually finds the same shapes in the compile cache.
FREE_MEMORY_STEPS = 32


@dataclass(frozen=True)
class MemoryBudget:
    """The memory plan of one rank; all sizes in bytes.

    ``total_bytes`` is this rank's share of the device and ``free_bytes`` its share of what is free **after**
    its weights were loaded. ``activation_bytes`` is headroom for one step's intermediate tensors.
    ``requested_kv_bytes`` is vLLM's ``--kv-cache-memory-bytes``: it replaces the computed size and is still
    checked against free memory. Raises ``ConfigError`` for a fraction outside (0, 1] and ``CapacityError``
    for a request above free memory.
    """

    total_bytes: int
    free_bytes: int
    utilization: float
    weights_bytes: int
    activation_bytes: int = 0
    reserve_bytes: int = DEFAULT_RESERVE_BYTES
    cap_fraction: float = DEFAULT_KV_CAP_FRACTION
    requested_kv_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check fractions and an explicitly requested size."""
        for name, value in (
            ("gpu_memory_utilization", self.utilization),
            ("kv_cap_fraction", self.cap_fraction),
        ):
            if not 0.0 < value <= 1.0:
                raise ConfigError(name, value, "must be above 0 and at most 1; 0.9 works")
        if self.requested_kv_bytes is not None:
            self._check_request(self.requested_kv_bytes)

    @classmethod
    def for_device(
        cls,
        device: Device,
        *,
        ranks_on_host: int,
        utilization: float,
        weights_bytes: int,
        activation_bytes: int = 0,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
        cap_fraction: float = DEFAULT_KV_CAP_FRACTION,
        requested_kv_bytes: int | None = None,
    ) -> MemoryBudget:
        """The budget on a device as it is now; call it after weights are loaded.

        Ranks that draw on the same memory (the CPU device) each plan with an equal share of it.
        """
        ranks = ranks_on_host if device.ranks_share_memory else 1
        return cls(
            total_bytes=device.total_memory_bytes() // ranks,
            free_bytes=device.available_memory_bytes() // ranks,
            utilization=utilization,
            weights_bytes=weights_bytes,
            activation_bytes=activation_bytes,
            reserve_bytes=reserve_bytes,
            cap_fraction=cap_fraction,
            requested_kv_bytes=requested_kv_bytes,
        )

    @property
    def limits(self) -> dict[str, int]:
        """Every limit on the KV cache in bytes, by the name used in ``limited_by``; never negative."""
        step = max(1, self.total_bytes // FREE_MEMORY_STEPS)
        free = self._free_for_kv
        limits = {
            "utilization": int(self.total_bytes * self.utilization) - self.weights_bytes - self._headroom,
            "cap": int(self.total_bytes * self.cap_fraction),
            "free": free - free % step if free >= step else free,
        }
        return {name: max(0, size) for name, size in limits.items()}

    @property
    def limited_by(self) -> str:
        """Which limit decides: ``utilization``, ``cap``, ``free``, or ``request`` for an explicit size."""
        if self.requested_kv_bytes is not None:
            return "request"
        limits = self.limits
        return min(limits, key=lambda name: limits[name])

    @property
    def kv_bytes(self) -> int:
        """Bytes for the KV tensors of all layers together."""
        if self.requested_kv_bytes is not None:
            return self.requested_kv_bytes
        return min(self.limits.values())

    def num_blocks(self, layouts: Sequence[KVLayout]) -> int:
        """Blocks that fit, the null block included; a block id takes one block of every layer."""
        return self.kv_bytes // bytes_per_block(layouts)

    def require_one_request(
        self, max_model_len: int, layouts: Sequence[KVLayout], num_blocks: int | None = None
    ) -> None:
        """Raise ``CapacityError`` unless one request of ``max_model_len`` tokens fits beside the null block.

        ``num_blocks`` is vLLM's ``--num-gpu-blocks-override``; None means what the budget holds. It must itself
        fit what is free, because vLLM allocates it whatever the budget says; below 1 it is a ``ConfigError``. The
        message has the numbers, a ``--max-model-len`` that works and the flag that gives more memory.
        """
        block_size = min(layout.block_size for layout in layouts)
        need = blocks_for(max_model_len, block_size) + 1
        if num_blocks is not None:
            self._check_override(num_blocks, layouts)
        have = self.num_blocks(layouts) if num_blocks is None else num_blocks
        if have >= need:
            return
        per_block = bytes_per_block(layouts)
        holds = f"{have} blocks" if num_blocks is not None else f"{have} ({format_bytes(self.kv_bytes)})"
        fits = max(0, have - 1) * block_size
        shorter = f"--max-model-len {fits} works" if fits else "no --max-model-len works"
        if num_blocks is None:
            remedy = self._remedy(need * per_block)
        elif need <= self._most_blocks(layouts):
            remedy = f"raise --num-gpu-blocks-override to {need} or more"
        else:
            remedy = f"free memory: only {self._most_blocks(layouts)} blocks fit here"
        raise CapacityError(
            f"KV cache too small: one request of max_model_len={max_model_len} needs {need} blocks "
            f"({format_bytes(need * per_block)}; {block_size} tokens a block, the null block included), "
            f"but the cache holds {holds}: short by {format_bytes((need - have) * per_block)}. "
            f"{shorter}; or {remedy}.\n{self.describe(layouts, num_blocks)}"
        )

    def describe(self, layouts: Sequence[KVLayout] = (), num_blocks: int | None = None) -> str:
        """The whole calculation as text of several lines, for the log.

        With ``layouts`` it ends in blocks and tokens; ``num_blocks`` is vLLM's ``--num-gpu-blocks-override``.
        """
        limits = self.limits
        rows = [
            ("total (this rank's share)", format_bytes(self.total_bytes)),
            ("free after loading weights", format_bytes(self.free_bytes)),
            ("weights", format_bytes(self.weights_bytes)),
            ("activation headroom", format_bytes(self.activation_bytes)),
            ("reserve", format_bytes(self.reserve_bytes)),
            (
                f"limit: total x utilization {self.utilization:g} - terms above",
                format_bytes(limits["utilization"]),
            ),
            (f"limit: total x cap {self.cap_fraction:g}", format_bytes(limits["cap"])),
            ("limit: free - headroom - reserve", format_bytes(limits["free"])),
            (f"KV cache (by {self.limited_by})", format_bytes(self.kv_bytes)),
        ]
        if layouts:
            rows += self._block_rows(layouts, num_blocks)
        return format_rows("Memory budget:", rows)

    @property
    def _headroom(self) -> int:
        return self.activation_bytes + self.reserve_bytes

    @property
    def _free_for_kv(self) -> int:
        return self.free_bytes - self._headroom

    def _block_rows(self, layouts: Sequence[KVLayout], num_blocks: int | None) -> list[tuple[str, str]]:
        per_block = bytes_per_block(layouts)
        rows = [("one block of every layer", format_bytes(per_block))]
        count = self.num_blocks(layouts)
        if num_blocks is not None:
            count = num_blocks
            rows.append(("KV cache (by --num-gpu-blocks-override)", format_bytes(count * per_block)))
        tokens = max(0, count - 1) * min(layout.block_size for layout in layouts)
        return [*rows, ("blocks, the null block included", f"{count}"), ("tokens they hold", f"{tokens}")]

    def _most_blocks(self, layouts: Sequence[KVLayout]) -> int:
        """The largest ``--num-gpu-blocks-override`` that can be allocated."""
        room = self._free_for_kv if self.requested_kv_bytes is None else self.requested_kv_bytes
        return max(0, room) // bytes_per_block(layouts)

    def _check_override(self, num_blocks: int, layouts: Sequence[KVLayout]) -> None:
        most = self._most_blocks(layouts)
        if num_blocks < 1:
            hint = "must be at least 2: a request's block and the null block"
            raise ConfigError("--num-gpu-blocks-override", num_blocks, hint)
        if num_blocks <= most:
            return
        needs = format_bytes(num_blocks * bytes_per_block(layouts))
        if self.requested_kv_bytes is not None:
            room = f"--kv-cache-memory-bytes {self.requested_kv_bytes} allows"
        else:
            room = f"is free: {format_bytes(self.free_bytes)} less {format_bytes(self._headroom)} headroom"
        works = f"--num-gpu-blocks-override {most} works" if most else "not even one block fits"
        raise CapacityError(
            f"--num-gpu-blocks-override {num_blocks} ({needs}) is more than {room}; {works}\n"
            f"{self.describe(layouts, num_blocks)}"
        )

    def _check_request(self, requested: int) -> None:
        if requested < 1:
            hint = "must be at least 1; left out, the size follows from what is free"
            raise ConfigError("--kv-cache-memory-bytes", requested, hint)
        if requested > self._free_for_kv:
            raise CapacityError(
                f"--kv-cache-memory-bytes {requested} ({format_bytes(requested)}) is more than is free: "
                f"{format_bytes(self.free_bytes)} less {format_bytes(self._headroom)} headroom; "
                f"--kv-cache-memory-bytes {max(0, self._free_for_kv)} works"
            )

    def _remedy(self, needed_bytes: int) -> str:
        if needed_bytes > self._free_for_kv:
            return f"free memory: only {format_bytes(self.free_bytes)} is free here"
        # The free limit is rounded down, so the memory may be there although the computed size is not.
        explicit = f"--kv-cache-memory-bytes {needed_bytes} (or more)"
        if self.limited_by != "utilization":
            return f"set {explicit}"
        wanted = (needed_bytes + self.weights_bytes + self._headroom) / max(1, self.total_bytes)
        if wanted < 0.995 and needed_bytes <= self.limits["cap"]:
            return f"raise --gpu-memory-utilization to {wanted + 0.005:.2f}, or set {explicit}"
        return f"set {explicit}"


def module_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and buffers, tied ones counted once."""
    return tensor_bytes(tensor for module in modules for tensor in [*module.parameters(), *module.buffers()])


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of all tensors, shared ones counted once."""
    return sum({_storage_id(tensor): _storage_bytes(tensor) for tensor in tensors}.values())


def format_rows(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A table for the log: a title line, then names to the left and figures to the right."""
    names = max(len(name) for name, _ in rows)
    figures = max(len(figure) for _, figure in rows)
    return "\n".join([title, *(f"  {name:<{names}}  {figure:>{figures}}" for name, figure in rows)])


def format_bytes(size: int) -> str:
    """A size for people: ``512 B``, ``1.5 MiB``, ``23.0 GiB``."""
    if abs(size) < 1024:
        return f"{size} B"
    power = min(3, (abs(size).bit_length() - 1) // 10)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def bytes_per_block(layouts: Sequence[KVLayout]) -> int:
    """Bytes one block id takes in all layers together; raises ``ValueError`` without a layer."""
    if not layouts:
        raise ValueError("a KV budget needs at least one layer's layout")
    return sum(layout.block_bytes for layout in layouts)


def _storage_id(tensor: torch.Tensor) -> int:
    # Packed and meta tensors have no address of their own; the object then stands for itself.
    if tensor.layout is not torch.strided or tensor.is_meta:
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _storage_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes()
