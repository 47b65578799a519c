# SPDX-License-Identifier: Apache-2.0
"""The machine a doctor looks at: its settings, its device nodes and its type."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neuron_core.devices.chips import ChipSpec, chip_for_instance, chip_for_target
from neuron_core.environ import Environment

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """What every check may ask; ``dev`` and ``sys`` are where the kernel's files are mounted.

    ``environment`` is ``variables`` after reading and checking.
    """

    environment: Environment
    variables: Mapping[str, str]
    dev: Path = Path("/dev")
    sys: Path = Path("/sys")

    @functools.cached_property
    def num_device_nodes(self) -> int:
        """Neuron device nodes, one per chip."""
        return len(list(self.dev.glob("neuron[0-9]*")))

    @functools.cached_property
    def instance_type(self) -> str | None:
        """The EC2 instance type, which its firmware gives as the product's name; None on other machines."""
        try:
            name = (self.sys / "devices/virtual/dmi/id/product_name").read_text().strip()
        except OSError:
            return None
        return name if "." in name and chip_for_instance(name) is not None else None

    @functools.cached_property
    def chip(self) -> ChipSpec | None:
        """The chip of this instance type, or None."""
        return None if self.instance_type is None else chip_for_instance(self.instance_type)

    @property
    def wants_neuron(self) -> bool:
        """Whether Neuron is meant to run here: forced, or there is a device and nobody forced the CPU."""
        if self.environment.device is not None:
            return self.environment.device == "neuron"
        return self.num_device_nodes > 0

    @property
    def wants_neuron_compiler(self) -> bool:
        """Whether graphs are to be compiled for a Neuron chip here, with or without having one."""
        return self.wants_neuron or self.environment.platform_target not in (None, "cpu")

    @property
    def target_chip(self) -> ChipSpec | None:
        """The chip graphs are compiled for: the override's, or this instance's."""
        target = self.environment.platform_target
        return chip_for_target(target) if target not in (None, "cpu") else self.chip
