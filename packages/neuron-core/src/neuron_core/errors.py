# SPDX-License-Identifier: Apache-2.0
"""Every error this family of packages raises on purpose, so that a caller can catch one base class."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CacheError",
    "CapacityError",
    "CheckpointError",
    "CompileError",
    "ConfigError",
    "DeviceError",
    "NeuronError",
    "NotCompiledError",
    "UncompiledShapeError",
    "nearest_name",
    "unknown_name_hint",
]


class NeuronError(Exception):
    """Base of every error raised on purpose by the Neuron packages."""


class ConfigError(NeuronError, ValueError):
    """A setting that cannot work; the message is ``{setting}={value!r}: {hint}``.

    ``hint`` says what is wrong and names a value that works. Start-up stops before weights are loaded.
    """

    def __init__(self, setting: str, value: object, hint: str) -> None:
        # All three go into args: an executor pickles errors across processes and rebuilds them from args.
        super().__init__(setting, value, hint)
        self.setting = setting
        self.value = value
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.setting}={self.value!r}: {self.hint}"


class CompileError(NeuronError):
    """A graph could not be captured, transformed or compiled.

    ``recordable`` says whether trying again unchanged would fail again, so that the cache may remember it.
    """

    recordable = True


class NotCompiledError(CompileError):
    """A graph is not in the compile cache and compiling is forbidden."""

    recordable = False


class UncompiledShapeError(NeuronError):
    """A step needs a shape that has no graph; after ready that is never answered by compiling."""


class CheckpointError(NeuronError, ValueError):
    """A checkpoint does not hold exactly the tensors the model needs, or cannot be read."""


class CacheError(NeuronError):
    """The compile cache cannot be read or written, or an entry fails its check."""


class DeviceError(NeuronError, RuntimeError):
    """A device is absent, cannot start, or cannot do what was asked of it."""


class CapacityError(NeuronError, ValueError):
    """The memory left for the KV cache is too small for what was asked."""


def nearest_name(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to a mistyped one, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown_name_hint(name: str, valid: Iterable[str]) -> str:
    """One clause for an error message: the nearest valid name, or all of them when nothing is close."""
    names = sorted(valid)
    nearest = nearest_name(name, names)
    return f"did you mean {nearest!r}?" if nearest else f"valid names are {', '.join(names)}"
