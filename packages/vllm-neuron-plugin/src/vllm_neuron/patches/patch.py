# SPDX-License-Identifier: Apache-2.0
"""One change of vLLM or of what it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Patch"]


@dataclass(frozen=True)
class Patch:
    """One change of vLLM or of what it calls."""

    what: str
    why: str
    remove_when: str
    apply: Callable[[], None]
