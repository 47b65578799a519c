# SPDX-License-Identifier: Apache-2.0
"""Request records: from what is known before capture to a graph key, one JSON file each."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neuron_core.graphs.key import GraphKey, text_digest

__all__ = ["RequestRecords", "key_of"]


class RequestRecords:
    """``requests/<request key>.json`` of one cache directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, digest: str) -> dict[str, Any] | None:
        """A record, or None; a damaged one is as good as none."""
        try:
            stored = json.loads(self.path(digest).read_text())
            record = stored["record"]
            intact = stored["sha256"] == text_digest(json.dumps(record, sort_keys=True))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return record if intact and isinstance(record, dict) else None

    def put(self, digest: str, record: Mapping[str, Any]) -> None:
        """Store a JSON-ready record by one rename; raises ``OSError``."""
        content = json.dumps(record, sort_keys=True)
        temporary = self.folder / f"{digest}.{uuid.uuid4().hex}.tmp"
        temporary.write_text(json.dumps({"sha256": text_digest(content), "record": json.loads(content)}))
        os.replace(temporary, self.path(digest))

    def path(self, digest: str) -> Path:
        """The file of a record."""
        return self.folder / f"{digest}.json"

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every intact record with its request key."""
        for path in sorted(self.folder.glob("*.json")):
            record = self.get(path.stem)
            if record is not None:
                yield path.stem, record


def key_of(record: Mapping[str, Any]) -> str | None:
    """Digest of the graph key a record leads to; None for a record of another form."""
    components = record.get("components")
    if not isinstance(components, dict):
        return None
    if not all(isinstance(value, str) for value in components.values()):
        return None
    return GraphKey.of(components).digest
