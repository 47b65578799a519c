# SPDX-License-Identifier: Apache-2.0
"""What must be installed to compile for Neuron, per torch version, and the error that says so.

Versions are those of the SDK manifest of 2.31 and 2.32 (aws-neuron-sdk: src/helperscripts/n2-manifest.json).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from neuron_core.errors import CompileError

__all__ = ["WHEELS", "VendorToolsMissing", "VendorWheels", "wheels_hint"]


@dataclass(frozen=True)
class VendorWheels:
    """Requirements for one torch version: ``compiling`` lowers and compiles, ``running`` starts a device."""

    torch: str
    sdk: str
    compiling: tuple[str, ...]
    running: tuple[str, ...]
    chips: tuple[str, ...]


def _lite(torch: str, sdk: str, compiler: str, build: str) -> VendorWheels:
    return VendorWheels(
        torch=torch,
        sdk=sdk,
        compiling=(f"torch-xla=={torch}.*", f"neuronx-cc=={compiler}.*"),
        running=(f"libtorch_neuronx_lite=={torch}.0.1.0.{build}",),
        chips=("trn2", "trn3"),
    )


WHEELS: dict[str, VendorWheels] = {
    wheels.torch: wheels
    for wheels in (
        VendorWheels(
            torch="2.9",
            sdk="2.31",
            compiling=("torch-xla==2.9.*", "neuronx-cc==2.26.6360.*"),
            running=("torch-neuronx==2.9.0.2.15.32035",),
            chips=("trn1", "trn1n", "inf2", "trn2", "trn3"),
        ),
        _lite("2.10", "2.31", "2.26.6360", "696"),
        _lite("2.11", "2.32", "2.27.5334", "1284"),
        _lite("2.12", "2.32", "2.27.5334", "1284"),
    )
}
"""By torch's major and minor version, as text."""

_INDEX = (
    "from AWS's Neuron package index: put its address, which the SDK's setup guide gives, in PIP_EXTRA_INDEX_URL "
    "(public PyPI holds placeholders of these names)"
)


class VendorToolsMissing(CompileError):
    """The lowering or the vendor compiler is not installed; the message lists what to install.

    ``captured`` is the folder that keeps the captured graph, None when it was not kept.
    """

    recordable = False

    def __init__(self, message: str, captured: Path | None = None) -> None:
        super().__init__(message)
        self.captured = captured

    @classmethod
    def of(cls, label: str, reasons: Iterable[str], torch: str, captured: Path | None) -> VendorToolsMissing:
        """The error for a graph, the reasons each tool is not usable, and the running torch version."""
        kept = f"; the captured graph is kept in {captured}" if captured is not None else ""
        text = f"{label} cannot be compiled for Neuron: {'; '.join(reasons)}. {wheels_hint(torch)}{kept}"
        return cls(text, captured)


def wheels_hint(torch: str) -> str:
    """One or two sentences: what to install beside the running torch, or that no SDK supports it."""
    release = ".".join(torch.split("+", 1)[0].split(".")[:2])
    wheels = WHEELS.get(release)
    if wheels is not None:
        return f"For torch {release} install {' and '.join(wheels.compiling)} (SDK {wheels.sdk}) {_INDEX}"
    newest = WHEELS[max(WHEELS, key=_order)]
    needed = " and ".join((f"torch=={newest.torch}.*", *newest.compiling))
    return (
        f"No Neuron SDK up to {newest.sdk} supports torch {release} (they support {', '.join(WHEELS)}): use an "
        f"environment with {needed} {_INDEX}"
    )


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))
