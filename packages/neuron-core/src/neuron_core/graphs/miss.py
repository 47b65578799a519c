# SPDX-License-Identifier: Apache-2.0
"""Why a graph had to be compiled: the entry that comes nearest to it, and what differs."""

from __future__ import annotations

from collections.abc import Iterable

from neuron_core.graphs.cache import CacheEntry
from neuron_core.graphs.key import GraphKey

__all__ = ["explain_miss"]


def explain_miss(key: GraphKey, part: str, bucket: str, entries: Iterable[CacheEntry]) -> str:
    """One sentence for the log; ``neuron cache explain`` shows the values.

    Entries of the same part and bucket are compared; the one that differs in the fewest components is named.
    """
    label = " ".join(filter(None, (bucket, part)))
    alike = [
        entry
        for entry in entries
        if (entry.manifest.get("part"), entry.manifest.get("bucket")) == (part, bucket)
        and entry.digest != key.digest
    ]
    if not alike:
        return f"compiled {label} ({key.digest[:12]}): the cache had no graph of this part and bucket"
    compared = [(key.differences(_key_of(entry)), entry) for entry in alike]
    differing, nearest = min(compared, key=lambda item: len(item[0]))
    known = nearest.digest[:12]
    return f"compiled {label} ({key.digest[:12]}): it differs from {known} in {', '.join(differing)}"


def _key_of(entry: CacheEntry) -> GraphKey:
    """The key an entry says it has; entries are not verified here, so nothing in it is taken for granted."""
    components = entry.manifest.get("components")
    return GraphKey.of(components if isinstance(components, dict) else {})
