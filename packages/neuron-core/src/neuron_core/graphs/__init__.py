# SPDX-License-Identifier: Apache-2.0
"""Static-shape graphs: capture, passes, keys, the compile cache, compilers and ahead-of-time compilation."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_core.graphs.api import CompiledModule, compile

__all__ = ["CompiledModule", "compile"]


def __getattr__(name: str) -> Any:
    """Import on first use: planning code needs buckets without a compiler."""
    if name in __all__:
        return getattr(importlib.import_module("neuron_core.graphs.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
