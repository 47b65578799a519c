# SPDX-License-Identifier: Apache-2.0
"""What a run of pytest wrote down about its tests (see `upstream.plugin`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """What one test did."""

    outcome: str
    """``passed``, ``failed`` or ``skipped``; ``started`` if its process ended in it."""
    message: str = ""
    seconds: float = 0.0


def read(path: Path) -> dict[str, Result]:
    """Results by node id. A test that failed in any phase has failed, also after it passed (its teardown)."""
    found: dict[str, Result] = {}
    if not path.exists():
        return found
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        name, outcome = fields["id"], fields["outcome"]
        before = found.get(name)
        if before is not None and (before.outcome == "failed" or outcome == "started"):
            continue
        found[name] = Result(outcome, fields.get("message", ""), fields.get("seconds", 0.0))
    return found


def add(path: Path, node_id: str, result: Result) -> None:
    """Write a result that pytest could not write itself."""
    line = {"id": node_id, "outcome": result.outcome, "message": result.message, "seconds": result.seconds}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
