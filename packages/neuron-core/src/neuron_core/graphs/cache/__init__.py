# SPDX-License-Identifier: Apache-2.0
"""The local compile cache: one verified directory per graph key, shared by any number of processes.

``store`` is what others use; ``root`` knows the folders, ``entry`` what a whole entry is, ``locks`` who compiles a
key, ``failures`` what could not be compiled, ``records`` what capture would say, ``usage`` who has an entry loaded,
``eviction`` what may go, ``source`` what a remote store must offer.
"""

from __future__ import annotations

from neuron_core.graphs.cache.counters import CacheCounters
from neuron_core.graphs.cache.entry import CacheEntry
from neuron_core.graphs.cache.eviction import PruneReport
from neuron_core.graphs.cache.failures import Failure, RecordedFailure
from neuron_core.graphs.cache.source import RemoteSource
from neuron_core.graphs.cache.store import CompileCache

__all__ = [
    "CacheCounters",
    "CacheEntry",
    "CompileCache",
    "Failure",
    "PruneReport",
    "RecordedFailure",
    "RemoteSource",
]
