# SPDX-License-Identifier: Apache-2.0
"""Which versions of the Neuron packages belong together: AWS publishes them as numbered SDK releases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "COMPONENTS",
    "SDK_RELEASES",
    "SdkRelease",
    "common_releases",
    "numbers",
    "releases_of",
    "torch_of",
]

COMPONENTS = (
    "neuronx-cc",
    "torch-neuronx",
    "libtorch-neuronx-lite",
    "nki",
    "runtime",
    "driver",
    "torch",
    "python",
)
"""What the table tells apart, by the names the functions here take."""


@dataclass(frozen=True)
class SdkRelease:
    """One SDK release: ``name`` and the version of each component that belongs to it, None where it has none.

    Compiler, torch-neuronx, nki, runtime and driver are told apart by their first two numbers: a patch release
    of the SDK raises only the last one. Wheels of the torch stacks begin with the version of torch they are for:
    ``<torch>.<torch_neuronx>`` and ``<torch>.1.0.<libtorch_neuronx_lite>``, torch having three numbers. ``torch``
    and ``python`` are the ``major.minor`` versions the release is for. From the package manifest and the release
    notes of aws-neuron-sdk (src/helperscripts/n2-manifest.json, release-notes/).
    """

    name: str
    date: str
    neuronx_cc: str
    torch_neuronx: str | None
    libtorch_neuronx_lite: int | None
    nki: str
    runtime: str
    driver: str
    torch: tuple[str, ...]
    python: tuple[str, ...]


_PY_310 = ("3.10", "3.11", "3.12")
_PY_311 = ("3.11", "3.12", "3.13")
_PT_27 = ("2.7", "2.8", "2.9")
_PT_29 = ("2.9", "2.10", "2.11", "2.12")

# fmt: off
_ROWS: tuple[tuple[Any, ...], ...] = (
    # SDK, date, neuronx-cc, torch-neuronx, libtorch-neuronx-lite, nki, runtime, driver, torch, Python
    ("2.27", "2025-12", "2.22.12471", "2.11.19912", None, "0.1.0", "2.29.40", "2.25.4", _PT_27, _PY_310),
    ("2.28", "2026-02", "2.23.6484", "2.12.22436", None, "0.2.0", "2.30.51", "2.26.5", _PT_27, _PY_310),
    ("2.29", "2026-04", "2.24.5133", "2.13.24727", None, "0.3.0", "2.31.24", "2.27.4", ("2.9",), _PY_310),
    ("2.30", "2026-05", "2.25.3371", "2.14.27725", 239, "0.4.0", "2.32.31", "2.28.0", _PT_29[:2], _PY_311),
    ("2.31", "2026-07", "2.26.6360", "2.15.32035", 696, "0.5.0", "2.33.10", "2.29.0", _PT_29, _PY_311),
    ("2.32", "2026-08", "2.27.5334", None, 1284, "0.6.0", "2.34.10", "2.30.2", _PT_29[2:], _PY_311),
)
# fmt: on

SDK_RELEASES: tuple[SdkRelease, ...] = tuple(SdkRelease(*row) for row in _ROWS)
"""Every release this version knows, oldest first."""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.27.5334.0+1a2b`` gives ``(2, 27, 5334, 0)``; empty when there are none."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def torch_of(version: str) -> str | None:
    """The ``major.minor`` of torch that a wheel of a Neuron torch stack is for; None for a version of another form."""
    parts = numbers(version)
    return f"{parts[0]}.{parts[1]}" if len(parts) >= 5 else None


def releases_of(component: str, version: str) -> tuple[str, ...] | None:
    """Names of the SDK releases a component's version belongs to; None when it is not in the table.

    Raises ``KeyError`` for a component that is not one of ``COMPONENTS``.
    """
    found = tuple(release.name for release in SDK_RELEASES if _belongs(release, component, version))
    return found or None


def common_releases(versions: Mapping[str, str]) -> tuple[str, ...]:
    """The SDK releases all known versions belong to, oldest first; versions outside the table are left out."""
    known = [found for name, version in versions.items() if (found := releases_of(name, version))]
    return tuple(
        release.name for release in SDK_RELEASES if known and all(release.name in found for found in known)
    )


def _belongs(release: SdkRelease, component: str, version: str) -> bool:
    parts = numbers(version)
    if component in ("torch", "python"):
        return ".".join(map(str, parts[:2])) in getattr(release, component)
    if component == "libtorch-neuronx-lite":
        return len(parts) == 6 and parts[-1] == release.libtorch_neuronx_lite
    expected = {
        "neuronx-cc": release.neuronx_cc,
        "torch-neuronx": release.torch_neuronx,
        "nki": release.nki,
        "runtime": release.runtime,
        "driver": release.driver,
    }[component]
    if component == "torch-neuronx":
        parts = parts[3:]
    return expected is not None and parts[:2] == numbers(expected)[:2]
