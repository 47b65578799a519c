# SPDX-License-Identifier: Apache-2.0
"""Settings of a subject, as a caller gives them or as a command line does, in text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_accuracy.subjects.secrets import public_value
from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["read_options"]

_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def read_options(kind: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``defaults`` overlaid with ``options``, each of its default's type; text is parsed.

    Raises ``ConfigError`` on a name that has no default and on a value of another type.
    """
    for name, value in options.items():
        if name not in defaults:
            hint = f"unknown option; {unknown_name_hint(name, defaults)}"
            raise ConfigError(f"{kind}.{name}", public_value(name, value), hint)
    parsed = {name: _parsed(f"{kind}.{name}", value, defaults[name]) for name, value in options.items()}
    return {**defaults, **parsed}


def _parsed(setting: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        truth = _TRUTH.get(str(value).lower())
        if truth is None:
            raise ConfigError(setting, value, "must be true or false; true works")
        return truth
    if isinstance(default, int | float):
        try:
            return type(default)(value)
        except (TypeError, ValueError):
            raise ConfigError(setting, value, f"must be a number; {default} works") from None
    if not isinstance(value, str):
        raise ConfigError(setting, value, f"must be text; {default!r} works")
    return value
