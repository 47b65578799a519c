# SPDX-License-Identifier: Apache-2.0
"""What a check says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Finding", "Status"]


class Status(StrEnum):
    """How bad a finding is; only ``FAIL`` makes a machine unhealthy."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    ``name`` says what was looked at, ``found`` what is there, ``advice`` what to do about it (empty when there is
    nothing to do), and ``details`` holds the values behind it, JSON-ready.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "name": self.name,
            "status": str(self.status),
            "found": self.found,
            "advice": self.advice,
            "details": dict(self.details),
        }
