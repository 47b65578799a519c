# SPDX-License-Identifier: Apache-2.0
"""The lowest versions that the packages say they accept, and a second wheelhouse that holds them.

torch is left out: of it, only the CPU build that everything else is locked to can be had everywhere. So is
the plugin, whose vLLM decides the versions of nearly everything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import pins, places, wheelhouse

PINS = places.REQUIREMENTS / "lowest.txt"
LEFT_OUT = {"torch", "torch-neuronx", "neuronx-cc"}
NOT_TESTED = "vllm-neuron-plugin"


def floors(projects: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The version behind `>=` of every library that the packages require, with their extras."""
    found: dict[str, str] = {}
    for entry in projects:
        table = entry["project"]
        if table["name"] == NOT_TESTED:
            continue
        extras = table.get("optional-dependencies", {}).values()
        for requirement in [*table["dependencies"], *(item for extra in extras for item in extra)]:
            match = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)", requirement)
            if match and match[1] not in LEFT_OUT:
                found[match[1]] = match[2]
    return found


def ensure_wheelhouse() -> Path:
    """Fetch what the lowest versions need beyond the wheelhouse; returns the folder."""
    directory = places.cache_dir() / f"lowest-{places.digest(PINS.read_bytes())}"
    wheelhouse.fill(directory, pins.read(PINS), [sys.executable, "-m", "pip"])
    return directory
