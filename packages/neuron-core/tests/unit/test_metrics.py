# SPDX-License-Identifier: Apache-2.0
"""Series have their names and labels, survive vLLM's clean-up, and add up over processes."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from neuron_core.metrics import NeuronMetrics

RANK = {"model_name": "m", "rank_id": "1"}
PREFILL = RANK | {"bucket_name": "prefill_s128"}


def record(metrics: NeuronMetrics) -> None:
    metrics.graph_compiled("prefill_s128", 3)
    metrics.graph_loaded("prefill_s128")
    metrics.cache_used({"hits": 1, "misses": 1, "seconds_saved": 2.5})
    metrics.bucket_ready("prefill_s128", 1.5)
    metrics.model_loaded(2.5, 1000)
    metrics.started(9.0, {"import": 4.0})
    metrics.device_memory({"weights": 1000, "kv_cache": 64})
    metrics.preempted(2)
    metrics.prefix_cache_skipped(5)
    metrics.kv_blocks(99, 40)
    metrics.observe_step("prefill_s128", padded_seqs=3, padded_tokens=28)
    metrics.observe_step("prefill_s128", padded_seqs=0, padded_tokens=0)


def test_every_series_has_its_value_under_its_labels() -> None:
    registry = CollectorRegistry()
    record(NeuronMetrics("m", 1, registry))
    expected = {
        ("graphs_compiled_total", "bucket"): 3,
        ("graphs_loaded_total", "bucket"): 1,
        ("compile_cache_hits_total", "rank"): 1,
        ("compile_cache_misses_total", "rank"): 1,
        ("compile_cache_seconds_saved_total", "rank"): 2.5,
        ("compile_cache_evicted_total", "rank"): 0,
        ("preemptions_total", "rank"): 2,
        ("prefix_cache_skips_total", "rank"): 5,
        ("graph_executions_total", "bucket"): 2,
        ("num_seqs_padding_sum", "bucket"): 3,
        ("num_seqs_padding_count", "bucket"): 2,
        ("num_batched_tokens_padding_sum", "bucket"): 28,
        ("startup_time_seconds", "rank"): 9.0,
        ("compilation_time_seconds", "bucket"): 1.5,
        ("model_load_time_seconds", "rank"): 2.5,
        ("model_load_size_bytes", "rank"): 1000,
        ("kv_blocks_total", "rank"): 99,
        ("kv_blocks_free", "rank"): 40,
    }
    for (name, scope), value in expected.items():
        labels = PREFILL if scope == "bucket" else RANK
        assert registry.get_sample_value(f"vllm_neuron:{name}", labels) == value, name
    phase = {"phase": "import", **RANK}
    assert registry.get_sample_value("vllm_neuron:startup_phase_seconds", phase) == 4.0
    for kind, size in (("weights", 1000), ("kv_cache", 64)):
        labels = {"kind": kind, **RANK}
        assert registry.get_sample_value("vllm_neuron:device_memory_bytes", labels) == size


def test_the_exposition_is_valid_and_every_family_has_the_prefix() -> None:
    registry = CollectorRegistry()
    record(NeuronMetrics("m", 1, registry))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    names = {family.name for family in families if not family.name.endswith("_created")}
    assert {"vllm_neuron:graphs_compiled", "vllm_neuron:compile_cache_hits"} <= names
    assert all(family.name.startswith("vllm_neuron:") and family.documentation for family in families)


def test_two_objects_on_one_registry_share_series_and_registries_do_not() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    for registry_used in (registry, registry, other):
        NeuronMetrics("m", 1, registry_used).cache_used({"hits": 1})
    name = "vllm_neuron:compile_cache_hits_total"
    assert registry.get_sample_value(name, RANK) == 2
    assert other.get_sample_value(name, RANK) == 1


def test_series_come_back_after_vllm_removed_everything_named_vllm() -> None:
    registry = CollectorRegistry()
    metrics = NeuronMetrics("m", 1, registry)
    metrics.cache_used({"hits": 1})
    for collector in list(registry._collector_to_names):
        registry.unregister(collector)
    assert registry.get_sample_value("vllm_neuron:compile_cache_hits_total", RANK) is None
    metrics.register()
    metrics.register()
    assert registry.get_sample_value("vllm_neuron:compile_cache_hits_total", RANK) == 1


WRITER = """
import sys
from neuron_core.metrics import NeuronMetrics
rank, free = int(sys.argv[1]), int(sys.argv[2])
metrics = NeuronMetrics("m", rank)
metrics.graph_compiled("decode_b1", 2)
metrics.kv_blocks(10, free)
metrics.observe_step("decode_b1", padded_seqs=1, padded_tokens=1)
"""

READER = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_processes_merge_into_one_value_per_rank(tmp_path: Path) -> None:
    environment = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def run(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    run(WRITER, "0", "7")
    run(WRITER, "1", "5")
    run(WRITER, "0", "3")  # rank 0 started again
    samples = {
        (sample.name, sample.labels["rank_id"]): sample
        for family in text_string_to_metric_families(run(READER))
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert samples["vllm_neuron:kv_blocks_free", "0"].value == 3
    assert samples["vllm_neuron:kv_blocks_free", "1"].value == 5
    assert samples["vllm_neuron:graphs_compiled_total", "0"].value == 4
    assert samples["vllm_neuron:num_seqs_padding_count", "1"].value == 1
    assert "pid" not in samples["vllm_neuron:kv_blocks_total", "0"].labels
