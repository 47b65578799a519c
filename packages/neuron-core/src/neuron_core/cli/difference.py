# SPDX-License-Identifier: Apache-2.0
"""What differs between two keys of the compile cache, in words: the reason of a miss."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neuron_core.errors import CacheError

if TYPE_CHECKING:
    from neuron_core.graphs.cache import CacheEntry

__all__ = ["GRAPH_FILE", "Difference", "changed_values", "components_of", "differences"]

GRAPH_FILE = "graph.txt"
"""The canonical graph inside an entry; the component ``graph`` is its hash."""

_LONG_TEXT = 60


@dataclass(frozen=True)
class Difference:
    """One component of two keys that is not equal.

    ``changes`` are readable lines; ``diff`` is a unified diff of the graphs' text where both entries hold it.
    """

    component: str
    digests: tuple[str | None, str | None]
    changes: tuple[str, ...]
    diff: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "component": self.component,
            "digests": list(self.digests),
            "changes": list(self.changes),
            "diff": list(self.diff),
        }


def differences(first: CacheEntry, second: CacheEntry) -> list[Difference]:
    """The components in which two entries' keys differ, by name; empty for one key."""
    mine, theirs = components_of(first), components_of(second)
    found = []
    for name in sorted(mine.keys() | theirs.keys()):
        digests = (mine.get(name), theirs.get(name))
        if digests[0] == digests[1]:
            continue
        if name == "graph":
            diff = _graph_diff(first, second)
            changes = () if diff else (f"the graphs differ, and not both entries hold their {GRAPH_FILE}",)
            found.append(Difference(name, digests, changes, diff))
        else:
            found.append(Difference(name, digests, tuple(_changes(name, first.manifest, second.manifest))))
    return found


def components_of(entry: CacheEntry) -> Mapping[str, str]:
    """The components of an entry's key; raises ``CacheError`` when its manifest cannot be read."""
    components = _mapping(entry.manifest, "components")
    if not components:
        raise CacheError(
            f"{entry.path} does not say what its key is made of; neuron cache verify looks at it"
        )
    return components


def changed_values(before: Any, after: Any, where: str = "") -> list[str]:
    """Lines ``where: before → after`` of two JSON values; ``where`` is a path such as ``[0].shape``."""
    if isinstance(before, dict) and isinstance(after, dict):
        lines = []
        for name in sorted(before.keys() | after.keys()):
            path = f"{where}.{name}" if where else str(name)
            lines += _changed_item(name in before, name in after, before.get(name), after.get(name), path)
        return lines
    if isinstance(before, list) and isinstance(after, list) and not _scalars(before + after):
        lines = []
        for index in range(max(len(before), len(after))):
            old, new = before[index : index + 1], after[index : index + 1]
            lines += _changed_item(
                bool(old), bool(new), (old or [None])[0], (new or [None])[0], f"{where}[{index}]"
            )
        return lines
    if json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True):  # in Python, True == 1
        return []
    return [f"{where}: {line}" if where else line for line in _changed_scalar(before, after)]


def _changes(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    mine, theirs = _mapping(first, "key_facts"), _mapping(second, "key_facts")
    if name not in mine or name not in theirs:
        return ["only the hashes are known: not both entries say what is behind them"]
    if name == "op_sources":
        return _changed_sources(mine[name], theirs[name])
    return changed_values(mine[name], theirs[name])


def _changed_sources(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    lines = []
    for op in sorted(before.keys() | after.keys()):
        if op not in after:
            lines.append(f"{op}: only reached by the first")
        elif op not in before:
            lines.append(f"{op}: only reached by the second")
        elif before[op] != after[op]:
            lines.append(f"{op}: its source is another ({before[op][:12]} → {after[op][:12]})")
    return lines


def _changed_item(in_before: bool, in_after: bool, before: Any, after: Any, path: str) -> list[str]:
    if in_before and in_after:
        return changed_values(before, after, path)
    if in_before:
        return [f"{path}: {_shown(before)}, only in the first"]
    return [f"{path}: {_shown(after)}, only in the second"]


def _changed_scalar(before: Any, after: Any) -> list[str]:
    """One line; of two long texts only the words that differ, since instruction sets are lists of hundreds."""
    if isinstance(before, str) and isinstance(after, str) and max(len(before), len(after)) > _LONG_TEXT:
        old, new = before.split(), after.split()
        lines = []
        if gone := [word for word in old if word not in new]:
            lines.append(f"only in the first: {' '.join(gone)}")
        if added := [word for word in new if word not in old]:
            lines.append(f"only in the second: {' '.join(added)}")
        if lines:
            return lines
    return [f"{_shown(before)} → {_shown(after)}"]


def _graph_diff(first: CacheEntry, second: CacheEntry) -> tuple[str, ...]:
    texts = []
    for entry in (first, second):
        path = entry.path / GRAPH_FILE
        if not path.is_file():
            return ()
        texts.append(path.read_text().splitlines())
    before, after = texts
    return tuple(difflib.unified_diff(before, after, first.digest[:12], second.digest[:12], lineterm=""))


def _mapping(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = manifest.get(name)
    return value if isinstance(value, dict) else {}


def _scalars(values: list[Any]) -> bool:
    return not any(isinstance(value, dict | list) for value in values)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
