# SPDX-License-Identifier: Apache-2.0
"""Showing how far warm-up is, and what it cost."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from neuron_core.graphs.buckets import Bucket
from neuron_core.graphs.build import BuildStats
from neuron_core.metrics import NeuronMetrics


class WarmUpProgress:
    """A progress bar over graphs that also records what each bucket cost.

    ``stats`` are the builder's, read after each graph to tell compiled from loaded.
    """

    def __init__(self, stats: BuildStats, metrics: NeuronMetrics, *, shown: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._stats = stats
        self._metrics = metrics
        self._shown = shown
        self._bar: Any = None
        self._before = time.perf_counter()
        self._counted = (stats.compiled, stats.loaded)

    def __enter__(self) -> Self:
        """Start the clock of the first graph."""
        self._before = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int, bucket: Bucket, variant: str) -> None:
        """``done`` of ``total`` programs are ready, the last of them ``bucket``'s ``variant``."""
        now = time.perf_counter()
        self.seconds[bucket.name] = self.seconds.get(bucket.name, 0.0) + now - self._before
        self._before = now
        self._metrics.bucket_ready(bucket.name, self.seconds[bucket.name])
        self._count(bucket.name)
        if self._bar is None and self._shown:
            self._bar = tqdm(total=total, desc="Graphs", unit="graph", file=sys.stderr, dynamic_ncols=True)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{bucket.name} {variant}", refresh=False)
            self._bar.update(done - self._bar.n)

    def summary(self, seconds: float) -> str:
        """One line with the total and what each bucket cost."""
        each = ", ".join(f"{name} {spent:.1f}" for name, spent in self.seconds.items())
        stats = self._stats
        counts = f"{stats.compiled} compiled, {stats.loaded} loaded, {stats.shared} shared"
        return f"graphs ready in {seconds:.1f} s ({counts}); seconds per bucket: {each}"

    def _count(self, bucket_name: str) -> None:
        compiled, loaded = self._stats.compiled - self._counted[0], self._stats.loaded - self._counted[1]
        self._counted = (self._stats.compiled, self._stats.loaded)
        self._metrics.graph_compiled(bucket_name, compiled)
        self._metrics.graph_loaded(bucket_name, loaded)
