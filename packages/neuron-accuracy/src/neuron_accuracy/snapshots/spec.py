# SPDX-License-Identifier: Apache-2.0
"""Which calls' inputs are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["DEFAULT_MAX_BYTES", "SnapshotSpec"]

DEFAULT_MAX_BYTES = 4 * 2**30

_WORKS: dict[str, tuple[type, str]] = {
    "steps": (int, "[0]"),
    "tokens": (int, "[17]"),
    "requests": (str, '["*"]'),
    "parts": (str, '["layer.*"]'),
    "ranks": (int, "[0]"),
}
_NUMBERS = {"max_snapshots": 4, "max_bytes": DEFAULT_MAX_BYTES}


@dataclass(frozen=True)
class SnapshotSpec:
    """A step is kept if any of ``steps``, ``tokens`` and ``requests`` selects it.

    ``steps`` are numbers counted from 0, ``tokens`` ids that the step computes, ``requests`` patterns of request ids of
    which the step computes a token. ``parts`` are patterns of the parts of a program that are kept of it (each is one
    graph), ``ranks`` those that write; empty is all. At most ``max_snapshots`` steps are kept: the first ones. A step
    that would bring a rank's files beyond ``max_bytes`` is an error: weights and caches of its parts are written too.
    """

    steps: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    requests: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    max_snapshots: int = 4
    max_bytes: int = DEFAULT_MAX_BYTES

    def selects(self, step: int, tokens: tuple[int, ...], requests: tuple[str, ...]) -> tuple[str, ...]:
        """Which rules select a step, such as ``step 3``; none if it is not kept."""
        found = [f"step {step}"] if step in self.steps else []
        found += [f"token {token}" for token in self.tokens if token in tokens]
        found += [
            f"request {name}"
            for name in requests
            if any(fnmatchcase(name, pattern) for pattern in self.requests)
        ]
        return tuple(found)

    def wants_part(self, name: str) -> bool:
        """Whether a part is kept of a selected step."""
        return not self.parts or any(fnmatchcase(name, pattern) for pattern in self.parts)

    def wants_rank(self, rank: int) -> bool:
        """Whether a rank writes."""
        return not self.ranks or rank in self.ranks

    @classmethod
    def from_json(cls, setting: str, data: Mapping[str, Any]) -> SnapshotSpec:
        """Parse a JSON object; raises ``ConfigError`` on an unknown key, a wrong type, or if nothing is selected."""
        known = {item.name for item in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in data.items():
            where = f"{setting}.{name}"
            if name not in known:
                raise ConfigError(where, value, f"unknown key; {unknown_name_hint(str(name), known)}")
            values[name] = _number(where, value) if name in _NUMBERS else _items(where, name, value)
        spec = cls(**values)
        if not (spec.steps or spec.tokens or spec.requests):
            raise ConfigError(f"{setting}.steps", [], "nothing selects a step; [0] keeps the first")
        return spec


def _number(setting: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        works = _NUMBERS[setting.rpartition(".")[2]]
        raise ConfigError(setting, value, f"must be a whole number of at least 1; {works} works")
    return value


def _items(setting: str, name: str, value: object) -> tuple[Any, ...]:
    kind, works = _WORKS[name]
    if not isinstance(value, list | tuple) or not all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    ):
        raise ConfigError(setting, value, f"must be a list of {kind.__name__}; {works} works")
    return tuple(value)
