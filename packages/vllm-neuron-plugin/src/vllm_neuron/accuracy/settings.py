# SPDX-License-Identifier: Apache-2.0
"""The settings of captures, replacements and snapshots, as ``--additional-config`` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.snapshots.spec import SnapshotSpec
from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = [
    "CaptureSettings",
    "ReplacementSettings",
    "SnapshotSettings",
    "parse_capture",
    "parse_replacement",
    "parse_snapshots",
]


@dataclass(frozen=True)
class CaptureSettings:
    """What is captured, and the folder it goes to."""

    folder: Path
    spec: CaptureSpec


@dataclass(frozen=True)
class ReplacementSettings:
    """A capture of another run, and the modules whose outputs may come from it; which do is said while running."""

    folder: Path
    modules: tuple[str, ...]


@dataclass(frozen=True)
class SnapshotSettings:
    """Which calls' inputs are kept, and the folder they go to."""

    folder: Path
    spec: SnapshotSpec


def parse_capture(setting: str, value: object) -> CaptureSettings:
    """``{"folder": …, …}`` with the keys of `CaptureSpec`; raises ``ConfigError``."""
    folder, rest = _split(setting, value)
    return CaptureSettings(folder, CaptureSpec.from_json(setting, rest))


def parse_snapshots(setting: str, value: object) -> SnapshotSettings:
    """``{"folder": …, …}`` with the keys of `SnapshotSpec`; raises ``ConfigError``."""
    folder, rest = _split(setting, value)
    return SnapshotSettings(folder, SnapshotSpec.from_json(setting, rest))


def parse_replacement(setting: str, value: object) -> ReplacementSettings:
    """``{"folder": …, "modules": [patterns]}``; raises ``ConfigError``."""
    folder, rest = _split(setting, value)
    known = {item.name for item in fields(ReplacementSettings)}
    for name in rest:
        if name != "modules":
            hint = unknown_name_hint(str(name), known)
            raise ConfigError(f"{setting}.{name}", rest[name], f"unknown key; {hint}")
    modules = rest.get("modules")
    if not isinstance(modules, list | tuple) or not modules or not all(isinstance(m, str) for m in modules):
        raise ConfigError(
            f"{setting}.modules", modules, 'must be a list of patterns; ["model.layers.*"] works'
        )
    if not (folder / "capture.json").is_file():
        raise ConfigError(f"{setting}.folder", str(folder), "holds no capture; give the folder of one")
    return ReplacementSettings(folder, tuple(modules))


def _split(setting: str, value: object) -> tuple[Path, Mapping[str, Any]]:
    if not isinstance(value, Mapping):
        raise ConfigError(setting, value, 'must be a JSON object; {"folder": "captures", …} works')
    folder = value.get("folder")
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"{setting}.folder", folder, 'must name a folder; "captures" works')
    return Path(folder), {name: item for name, item in value.items() if name != "folder"}
