# SPDX-License-Identifier: Apache-2.0
"""The Neuron device, written against documented interfaces only. **It has not been run on hardware.**

The runtime handle ``torch.classes.neuron.Runtime`` and its methods, the ``NEURON_RT_*`` rules and the order
in which a worker starts are those of AWS's public documents and published plugin code.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from neuron_core.devices.chips import ChipSpec, chip_for_instance, chip_for_target
from neuron_core.devices.stream import InlineStream, Stream, ThreadStream
from neuron_core.environ import Environment, export
from neuron_core.errors import ConfigError, DeviceError

__all__ = ["NeuronDevice", "Probe", "load_stack", "probe", "probe_in_child"]

# PyPI holds placeholders of both names below these versions; the real ones come from AWS's own index.
STACKS: dict[str, tuple[int, int]] = {"libtorch_neuronx_lite": (2, 10), "torch_neuronx": (2, 0)}

PROBE_TIMEOUT_S = 120.0

DMI_PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")


@dataclass(frozen=True)
class Probe:
    """What trying to start Neuron found: ``num_cores`` logical cores, or 0 and one line of reason."""

    num_cores: int
    stack: str
    reason: str


def load_stack() -> tuple[str, str]:
    """Import the Neuron torch stack; returns its name with version, and the reason if there is none.

    Metadata alone proves nothing: the packages of these names on PyPI are placeholders that are empty or
    raise.
    """
    reasons = []
    for name, floor in STACKS.items():
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            reasons.append(f"{name} cannot be imported ({first_line})")
            continue
        version = _version(name, module)
        if _release(version) >= floor:
            return f"{name} {version}", ""
        wanted = ".".join(map(str, floor))
        reasons.append(
            f"{name} {version or 'without a version'} is a placeholder ({wanted} or later is needed)"
        )
    return "", "; ".join(reasons)


def probe() -> Probe:
    """Import the stack in this process and ask the runtime for its cores; a crash takes the process."""
    stack, reason = load_stack()
    if not stack:
        return Probe(0, "", reason)
    try:
        count = int(torch.classes.neuron.Runtime().get_nc_count())
    except (RuntimeError, AttributeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return Probe(0, stack, f"the runtime of {stack} does not start ({first_line})")
    if count < 1:
        why = "another process may hold the cores, or the driver is not loaded"
        return Probe(0, stack, f"the runtime of {stack} does not start (core count {count}: {why})")
    return Probe(count, stack, "")


def probe_in_child(timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
    """``probe`` in a short-lived process.

    A core belongs to the process that starts the runtime, so the one that only chooses a device must not keep
    it; and a crash of the vendor's libraries becomes a reason instead of the end of the server.
    """
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
        "from neuron_core.devices.neuron import probe; p = probe();"
        "print('\\n' + json.dumps([p.num_cores, p.stack, p.reason]))"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Probe(0, "", f"the Neuron runtime did not answer within {timeout_s:.0f} s")
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Probe(0, "", f"starting the Neuron runtime ended with status {done.returncode} ({last_line})")
    return Probe(*json.loads(done.stdout.splitlines()[-1]))


class NeuronDevice:
    """One logical Neuron core, seen from the worker process that owns it. Not run on hardware.

    Making the object touches nothing; ``start`` claims the core.
    """

    name = "neuron"
    ranks_share_memory = False
    overlaps_host = True

    def __init__(
        self, environment: Environment, stack: str = "", product_name: Path = DMI_PRODUCT_NAME
    ) -> None:
        self._environment = environment
        self._stack = stack
        self._runtime: Any = None
        self.chip: ChipSpec | None = _chip(environment, product_name)
        if self.chip is not None and environment.logical_nc_config is not None:
            self.chip.logical_cores_at(environment.logical_nc_config)

    @property
    def torch_device(self) -> torch.device:
        """``torch.device("neuron")``; importing the stack, which is done here, makes torch know the name."""
        self._load()
        return torch.device("neuron")

    def runtime_variables(self, rank: int, world_size: int) -> dict[str, str]:
        """What the runtime must find in the environment when it starts in ``rank``'s process.

        One core of ``NEURON_VISIBLE_DEVICES``, or core ``rank``. ``NEURON_RT_MAP_HBM`` lets the memory be
        registered for RDMA later; it is read only at start. Raises ``ConfigError`` if fewer cores are visible
        than ranks.
        """
        cores = self._environment.visible_devices or tuple(range(world_size))
        if len(cores) != world_size:
            hint = f"lists {len(cores)} cores for {world_size} ranks on this host; list exactly {world_size}"
            raise ConfigError("NEURON_VISIBLE_DEVICES", ",".join(map(str, cores)), hint)
        return {"NEURON_RT_VISIBLE_CORES": str(cores[rank]), "NEURON_RT_MAP_HBM": "1"}

    def start(self, rank: int, world_size: int) -> None:
        """Claim this rank's core and start the runtime.

        The caller has already agreed on ``NEURON_RT_ROOT_COMM_ID`` with the other ranks: starting latches it.
        """
        export(self.runtime_variables(rank, world_size))
        self._load()
        self._runtime = torch.classes.neuron.Runtime()
        self._runtime.initialize()
        count = int(self._runtime.get_nc_count())
        if count < 1:
            core = self.runtime_variables(rank, world_size)["NEURON_RT_VISIBLE_CORES"]
            raise DeviceError(
                f"the runtime of {self._stack} does not start on core {core} (core count {count})"
            )

    def total_memory_bytes(self) -> int:
        """HBM of this logical core in bytes: used plus free by the runtime's count."""
        return sum(self._memory_stats())

    def available_memory_bytes(self) -> int:
        """HBM of this logical core that is free, in bytes."""
        return self._memory_stats()[1]

    def prepare(self, module: nn.Module) -> None:
        """Leave weights as they are: the Neuron compiler chooses its own layouts."""

    def pin_threads(self, rank: int, world_size: int) -> None:
        """Leave host threads unbound: they only submit work."""

    def stream(self, *, overlap: bool) -> Stream:
        """The calling thread, or one thread beside it, which submits to the runtime and may wait for it."""
        return ThreadStream() if overlap else InlineStream()

    def synchronize(self) -> None:
        """Wait for the device. The stacks' ``torch.neuron`` modules differ; one has nothing to wait with."""
        wait = getattr(getattr(torch, "neuron", None), "synchronize", None)
        if wait is not None:
            wait()

    def identity(self) -> str:
        """Chip, logical core size and stack version: what a NEFF is bound to."""
        chip = self.chip.name if self.chip else "unknown"
        lnc = self._environment.logical_nc_config or (self.chip.default_lnc if self.chip else 1)
        return f"neuron-{self._environment.platform_target or chip}-lnc{lnc}-{self._stack.replace(' ', '-')}"

    def _load(self) -> None:
        self._stack, reason = load_stack()
        if not self._stack:
            raise DeviceError(f"the Neuron device cannot be used: {reason}")

    def _memory_stats(self) -> tuple[int, int]:
        if self._runtime is None:
            raise DeviceError("the Neuron device was asked for its memory before start()")
        used, free = self._runtime.get_vnc_memory_stats()
        return int(used), int(free)


def _chip(environment: Environment, product_name: Path) -> ChipSpec | None:
    # "cpu" is a target of compiling alone; a device in use is the chip that it is.
    if environment.platform_target is not None and environment.platform_target != "cpu":
        return chip_for_target(environment.platform_target)
    try:
        return chip_for_instance(product_name.read_text())
    except OSError:
        return None


def _version(name: str, module: ModuleType) -> str:
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, ...]:
    parts = version.split("+", 1)[0].split(".")[:2]
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)
