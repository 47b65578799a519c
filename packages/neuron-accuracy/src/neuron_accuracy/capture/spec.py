# SPDX-License-Identifier: Apache-2.0
"""What to capture of a run: modules by pattern, and filters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["DEFAULT_MAX_BYTES", "PHASES", "CaptureSpec"]

PHASES = ("prefill", "decode")
DEFAULT_MAX_BYTES = 10 * 2**30


@dataclass(frozen=True)
class CaptureSpec:
    """Which tensors of which modules in which steps. An empty filter takes everything.

    ``modules`` are no filter but what is taken: shell patterns of qualified names (``model.layers.*.mlp``); ``**``
    alone takes every module, and none at all is a capture of caches only.
    ``tensors`` are patterns of a tensor's name in its module: ``output.0``, ``output.1``, …, ``input.0``, …; inputs
    are written only if a pattern says so. ``steps`` and ``ranks`` are numbers counted from 0, ``requests`` patterns of
    request ids. ``kv`` takes the cache of each selected request when it ends. A capture that would grow beyond
    ``max_bytes`` on a rank ends in ``CaptureError``.
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...] = ("output.*",)
    phases: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    requests: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    kv: bool = False
    max_bytes: int = DEFAULT_MAX_BYTES

    def wants_module(self, name: str) -> bool:
        """Whether a module of this qualified name is taken."""
        return any(pattern == "**" or fnmatchcase(name, pattern) for pattern in self.modules)

    def wants_tensor(self, name: str) -> bool:
        """Whether a tensor of a taken module is, by its name in it."""
        return not self.tensors or any(fnmatchcase(name, pattern) for pattern in self.tensors)

    def wants_step(self, phase: str, step: int, requests: tuple[str, ...]) -> bool:
        """Whether a step with these requests is taken."""
        return (
            (not self.phases or phase in self.phases)
            and (not self.steps or step in self.steps)
            and (not self.requests or any(self.wants_request(name) for name in requests))
        )

    def wants_request(self, request: str) -> bool:
        """Whether a request's rows and cache are taken."""
        return not self.requests or any(fnmatchcase(request, pattern) for pattern in self.requests)

    def wants_rank(self, rank: int) -> bool:
        """Whether a rank writes anything."""
        return not self.ranks or rank in self.ranks

    @classmethod
    def from_json(cls, setting: str, data: object) -> CaptureSpec:
        """Parse a JSON object; raises ``ConfigError`` on an unknown key, a wrong type or value."""
        if not isinstance(data, Mapping):
            raise ConfigError(
                setting, data, 'must be a JSON object; {"modules": ["model.layers.*.mlp"]} works'
            )
        known = {item.name for item in fields(cls)}
        for name in data:
            if name not in known:
                raise ConfigError(
                    f"{setting}.{name}", data[name], f"unknown key; {unknown_name_hint(str(name), known)}"
                )
        values = {name: _checked(f"{setting}.{name}", name, value) for name, value in data.items()}
        if not values.get("modules") and not values.get("kv"):
            raise ConfigError(f"{setting}.modules", data.get("modules"), 'names no module; ["**"] takes all')
        return cls(**{"modules": (), **values})

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form, read back by :meth:`from_json`."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _checked(setting: str, name: str, value: object) -> Any:
    if name == "kv":
        if not isinstance(value, bool):
            raise ConfigError(setting, value, "must be true or false; true works")
        return value
    if name == "max_bytes":
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(setting, value, f"must be a whole number of bytes; {DEFAULT_MAX_BYTES} works")
        return value
    kind, works = (int, "[0]") if name in ("steps", "ranks") else (str, '["*"]')
    if not isinstance(value, list | tuple) or not all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    ):
        raise ConfigError(setting, value, f"must be a list of {kind.__name__}; {works} works")
    if name == "phases" and (wrong := [item for item in value if item not in PHASES]):
        raise ConfigError(setting, wrong[0], f"no such phase; {unknown_name_hint(str(wrong[0]), PHASES)}")
    return tuple(value)
