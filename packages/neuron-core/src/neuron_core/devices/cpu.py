# SPDX-License-Identifier: Apache-2.0
"""The CPU device: the embedded default, and the device every feature is proven on."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch
from torch import nn

from neuron_core.devices.chips import ChipSpec
from neuron_core.devices.host import Host
from neuron_core.devices.stream import InlineStream, Stream, ThreadStream
from neuron_core.errors import ConfigError

__all__ = ["CpuDevice", "cpu_identity"]

# Compilers are told -march=native, so code depends on every instruction family a compiler emits.
# fmt: off
_ISA_PREFIXES = (
    "abm", "adx", "aes", "amx", "asimd", "avx", "bf16", "bmi", "f16c", "fma", "fphp", "gfni", "i8mm", "lzcnt",
    "movbe", "movdir", "popcnt", "sha", "sse", "ssse", "sve", "vaes", "vpclmul",
)
# fmt: on


class CpuDevice:
    """The host's processors and memory, within the control-group limits of this process.

    ``host`` is where those limits are read from; ``cache_dir`` is where the kernels are built and kept.
    """

    name = "cpu"
    chip: ChipSpec | None = None
    ranks_share_memory = True
    overlaps_host = False

    def __init__(self, host: Host | None = None, cache_dir: Path | None = None) -> None:
        self._host = host or Host()
        self._cache_dir = cache_dir
        self._num_threads = len(self._host.cpus())

    @property
    def torch_device(self) -> torch.device:
        """``torch.device("cpu")``."""
        return torch.device("cpu")

    def start(self, rank: int, world_size: int) -> None:
        """Load the kernels, building them the first time, and pin this rank's threads.

        Without ``cache_dir`` ops run as plain PyTorch. Raises ``CompileError`` if kernels cannot be built.
        """
        from neuron_core import ops

        if self._cache_dir is not None:
            ops.load_kernels(self._cache_dir)
        self.pin_threads(rank, world_size)

    def total_memory_bytes(self) -> int:
        """Physical memory, or this process's control-group limit if that is less."""
        return self._host.total_memory_bytes()

    def available_memory_bytes(self) -> int:
        """Memory that can be allocated now without swapping and within control-group limits."""
        return self._host.available_memory_bytes()

    def threads(self, rank: int, world_size: int) -> list[int]:
        """Processor ids of ``rank``'s slice.

        Slices are disjoint and equally long, because ranks wait for the slowest and share compiled code,
        which depends on the thread count; a remainder stays unused. With fewer processors than ranks they are
        shared.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(
                "rank", rank, f"must be 0 to {world_size - 1} for {world_size} ranks on this host"
            )
        cpus = self._host.cpus()
        share = len(cpus) // world_size
        if share == 0:
            return [cpus[rank % len(cpus)]]
        return cpus[rank * share : (rank + 1) * share]

    def prepare(self, module: nn.Module) -> None:
        """Replace every linear weight that a packed kernel exists for by its packed form."""
        from neuron_core import ops  # loads the kernels, which pure planning code does not need

        ops.pack_module(module)

    def pin_threads(self, rank: int, world_size: int) -> None:
        """Use one compute thread per processor of this rank's slice, each bound to its processor."""
        from neuron_core import ops

        cpus = self.threads(rank, world_size)
        ops.pin_threads(cpus)
        self._num_threads = len(cpus)

    def stream(self, *, overlap: bool) -> Stream:
        """The calling thread, or one thread beside it."""
        return ThreadStream() if overlap else InlineStream()

    def synchronize(self) -> None:
        """Do nothing: work on the CPU has finished when the call returns."""

    def identity(self) -> str:
        """Architecture, vector capability, a digest of the instruction sets, and the thread count.

        For example ``cpu-x86_64-AVX512-1f0c2a9b-t2``; call it after ``pin_threads`` for the rank's thread
        count.
        """
        return f"{cpu_identity(self._host)}-t{self._num_threads}"


def cpu_identity(host: Host | None = None) -> str:
    """Architecture, vector capability and a digest of the instruction sets that compiled code may use."""
    flags = [flag for flag in (host or Host()).isa_flags() if flag.startswith(_ISA_PREFIXES)]
    digest = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:8]
    return f"cpu-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-{digest}"
