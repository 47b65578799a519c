# SPDX-License-Identifier: Apache-2.0
"""Prometheus series of one rank, all named ``vllm_neuron:…``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["PREFIX", "NeuronMetrics"]

PREFIX = "vllm_neuron:"

_RANK = ("model_name", "rank_id")
_BUCKET = ("model_name", "bucket_name", "rank_id")
_CACHE = {
    "hits": "Graphs the compile cache had.",
    "misses": "Graphs that were compiled.",
    "invalid": "Cache entries that failed their check and were removed.",
    "remote_hits": "Graphs fetched from the remote store.",
    "remote_misses": "Graphs the remote store did not give.",
    "remote_refused": "Remote entries that nobody approved or that failed their check.",
    "evicted": "Cache entries removed for their size or age.",
    "bytes_read": "Bytes of artifacts read and checked.",
    "bytes_written": "Bytes of artifacts compiled.",
    "bytes_downloaded": "Bytes fetched from the remote store.",
    "seconds_saved": "Seconds the graphs that were found once took to compile.",
}
_GAP_STEPS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)
_SEQS_STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS_STEPS = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class _Collectors:
    """The collectors of one registry: made once per process, because a registry refuses a name twice."""

    def __init__(self) -> None:
        self.graphs_compiled = _counter("graphs_compiled", "Graphs compiled since start.", _BUCKET)
        self.graphs_loaded = _counter("graphs_loaded", "Graphs loaded from the compile cache.", _BUCKET)
        self.compile_cache = {
            name: _counter(f"compile_cache_{name}", text, _RANK) for name, text in _CACHE.items()
        }
        self.preemptions = _counter("preemptions", "Requests preempted for lack of KV blocks.", _RANK)
        text = "Requests whose prompt was not looked up in the prefix cache although it is on."
        self.prefix_cache_skips = _counter("prefix_cache_skips", text, _RANK)
        text = "Steps submitted while the one before ran, and fed on the device if they need its tokens."
        self.async_steps = _counter("async_steps", text, _RANK)
        text = "Steps submitted while the one before ran that had to wait for the host to read its tokens."
        self.sync_fallback_steps = _counter("sync_fallback_steps", text, _RANK)
        text = "Time the device waited for the host between two steps of the same requests."
        self.host_gap_seconds = _histogram("host_gap_seconds", text, _GAP_STEPS, _RANK)
        self.graph_executions = _counter("graph_executions", "Steps run, by bucket.", _BUCKET)
        self.num_seqs_padding = _histogram("num_seqs_padding", "Padding rows of a step.", _SEQS_STEPS)
        text = "Padding tokens of a step."
        self.num_batched_tokens_padding = _histogram("num_batched_tokens_padding", text, _TOKENS_STEPS)
        self.startup_time_seconds = _gauge("startup_time_seconds", "Process start to ready.", _RANK)
        text = "Parts of the start-up, which follow one another."
        self.startup_phase_seconds = _gauge("startup_phase_seconds", text, ("model_name", "phase", "rank_id"))
        text = "Compiling or loading the graphs of a bucket."
        self.compilation_time_seconds = _gauge("compilation_time_seconds", text, _BUCKET)
        self.model_load_time_seconds = _gauge("model_load_time_seconds", "Loading the weights.", _RANK)
        self.model_load_size_bytes = _gauge("model_load_size_bytes", "Weights of this rank.", _RANK)
        text = "Memory of this rank by what it holds."
        self.device_memory_bytes = _gauge("device_memory_bytes", text, ("model_name", "kind", "rank_id"))
        self.kv_blocks_total = _gauge("kv_blocks_total", "KV blocks requests can use.", _RANK)
        self.kv_blocks_free = _gauge("kv_blocks_free", "KV blocks no request holds.", _RANK)

    def register(self, registry: CollectorRegistry) -> None:
        """Add the collectors that the registry does not hold."""
        single = (value for name, value in vars(self).items() if name != "compile_cache")
        for collector in (*single, *self.compile_cache.values()):
            try:
                registry.register(collector)
            except ValueError:  # already there: the registry has no public way to ask
                continue


_lock = threading.Lock()
_by_registry: weakref.WeakKeyDictionary[CollectorRegistry, _Collectors] = weakref.WeakKeyDictionary()


class NeuronMetrics:
    """Records what one rank of one model does.

    Several objects on one registry share their series. With ``PROMETHEUS_MULTIPROC_DIR`` set before
    ``prometheus_client`` is imported, values go to files there and the API server merges them; gauges then
    keep the latest value of each rank.
    """

    def __init__(self, model_name: str, rank_id: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._rank = (model_name, str(rank_id))
        with _lock:
            self._collectors = _by_registry.setdefault(registry, _Collectors())
        self._steps: dict[str, tuple[Counter, Histogram, Histogram]] = {}
        self.register()

    def register(self) -> None:
        """Make sure the registry holds the series.

        A registry that something else has cleared does not; vLLM clears only its own series.
        """
        with _lock:
            self._collectors.register(self._registry)

    def graph_compiled(self, bucket_name: str, count: int = 1) -> None:
        """``count`` graphs of a bucket were compiled."""
        self._collectors.graphs_compiled.labels(*self._bucket(bucket_name)).inc(count)

    def graph_loaded(self, bucket_name: str, count: int = 1) -> None:
        """``count`` graphs of a bucket were loaded from the cache."""
        self._collectors.graphs_loaded.labels(*self._bucket(bucket_name)).inc(count)

    def cache_used(self, counters: Mapping[str, float]) -> None:
        """What the compile cache was asked for since the last call; names as ``CacheCounters`` has them."""
        for name, collector in self._collectors.compile_cache.items():
            collector.labels(*self._rank).inc(counters.get(name, 0))

    def bucket_ready(self, bucket_name: str, seconds: float) -> None:
        """A bucket's graphs took ``seconds`` to compile or load."""
        self._collectors.compilation_time_seconds.labels(*self._bucket(bucket_name)).set(seconds)

    def model_loaded(self, seconds: float, size_bytes: int) -> None:
        """This rank's weights were loaded."""
        self._collectors.model_load_time_seconds.labels(*self._rank).set(seconds)
        self._collectors.model_load_size_bytes.labels(*self._rank).set(size_bytes)

    def device_memory(self, sizes: Mapping[str, int]) -> None:
        """This rank holds that many bytes of each kind, such as ``weights``."""
        model_name, rank_id = self._rank
        for kind, size in sizes.items():
            self._collectors.device_memory_bytes.labels(model_name, kind, rank_id).set(size)

    def started(self, seconds: float, phases: Mapping[str, float] = MappingProxyType({})) -> None:
        """The rank is ready, ``seconds`` after its process started, spent on ``phases``."""
        self._collectors.startup_time_seconds.labels(*self._rank).set(seconds)
        model_name, rank_id = self._rank
        for phase, spent in phases.items():
            self._collectors.startup_phase_seconds.labels(model_name, phase, rank_id).set(spent)
        collectors = self._collectors
        for collector in (
            collectors.async_steps,
            collectors.sync_fallback_steps,
            collectors.host_gap_seconds,
        ):
            collector.labels(*self._rank)  # a rate needs the zero before the first step

    def preempted(self, count: int = 1) -> None:
        """``count`` requests lost their blocks and will be recomputed."""
        self._collectors.preemptions.labels(*self._rank).inc(count)

    def prefix_cache_skipped(self, count: int = 1) -> None:
        """``count`` requests were admitted without a look into the prefix cache, which is on."""
        self._collectors.prefix_cache_skips.labels(*self._rank).inc(count)

    def async_step(self, *, fell_back: bool) -> None:
        """A step was submitted while the one before ran; ``fell_back`` if the host then had to merge its tokens."""
        collector = self._collectors.sync_fallback_steps if fell_back else self._collectors.async_steps
        collector.labels(*self._rank).inc()

    def host_gap(self, seconds: float) -> None:
        """The device waited ``seconds`` for a step that goes on with requests of the one before."""
        self._collectors.host_gap_seconds.labels(*self._rank).observe(seconds)

    def kv_blocks(self, total: int, free: int) -> None:
        """The block pool: blocks requests can use (without the null block), and how many no request holds."""
        self._collectors.kv_blocks_total.labels(*self._rank).set(total)
        self._collectors.kv_blocks_free.labels(*self._rank).set(free)

    def observe_step(self, bucket_name: str, *, padded_seqs: int, padded_tokens: int) -> None:
        """One step ran in a bucket with that many rows and tokens of padding."""
        if bucket_name not in self._steps:
            labels = self._bucket(bucket_name)
            self._steps[bucket_name] = (
                self._collectors.graph_executions.labels(*labels),
                self._collectors.num_seqs_padding.labels(*labels),
                self._collectors.num_batched_tokens_padding.labels(*labels),
            )
        executions, seqs, tokens = self._steps[bucket_name]
        executions.inc()
        seqs.observe(padded_seqs)
        tokens.observe(padded_tokens)

    def _bucket(self, bucket_name: str) -> tuple[str, str, str]:
        model_name, rank_id = self._rank
        return (model_name, bucket_name, rank_id)


# registry=None: a collector is registered by _Collectors.register, and again if something removed it.
def _counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
    return Counter(PREFIX + name, text, labels, registry=None)


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> Gauge:
    # Only "mostrecent" gives one value per rank without a process-id label when several processes are merged.
    return Gauge(PREFIX + name, text, labels, registry=None, multiprocess_mode="mostrecent")


def _histogram(
    name: str, text: str, steps: tuple[float, ...], labels: tuple[str, ...] = _BUCKET
) -> Histogram:
    return Histogram(PREFIX + name, text, labels, registry=None, buckets=steps)
