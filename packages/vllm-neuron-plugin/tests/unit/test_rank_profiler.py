# SPDX-License-Identifier: Apache-2.0
"""A rank's profiler without an engine: on a chip, and the scheduler's times on their way between processes."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import time
from types import SimpleNamespace

import pytest
from vllm.config import ProfilerConfig
from vllm.v1.core.sched.output import SchedulerOutput

from neuron_core.profiling.explorer import inspection_variables
from neuron_core.profiling.timeline import Kind, timed
from vllm_neuron.profiling import ScheduleTimes, rank_profiler


@timed("decode_b4", Kind.GRAPH)
def graph() -> None:
    """What a profile sees."""


@pytest.fixture
def config(tmp_path):
    """Profiles into the test's folder."""
    return ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path), ignore_frontend=True)


def now(work):
    return work()


def test_none_is_made_unless_configured(config):
    cpu = SimpleNamespace(chip=None)
    assert rank_profiler(ProfilerConfig(), 0, 1, cpu, now) is None
    assert ScheduleTimes.wanted(ProfilerConfig()) is None
    assert ScheduleTimes.wanted(config) is not None


def test_on_a_chip_the_runtime_traces_and_torch_does_not(config, tmp_path, monkeypatch):
    for name in inspection_variables(tmp_path):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
    profiler = rank_profiler(config, 0, 1, SimpleNamespace(chip="a chip"), now)
    assert os.environ["NEURON_RT_INSPECT_OUTPUT_DIR"] == str(tmp_path / "rank0")
    assert os.environ["NEURON_RT_INSPECT_ENABLE"] == "1"
    profiler.profile(True)
    graph()
    profiler.profile(False)
    (path,) = tmp_path.glob("rank0_*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [(e["name"], e["cat"]) for e in events if e["ph"] == "X"] == [("decode_b4", "graph")]


def test_the_schedulers_times_travel_with_its_schedules(config, tmp_path):
    profiler = rank_profiler(config, 0, 1, SimpleNamespace(chip=None), now)
    times = ScheduleTimes.wanted(config)
    early = SchedulerOutput.make_empty()
    times.scheduled(time.perf_counter_ns(), early)
    profiler.profile(True)
    profiler.step_of(pickle.loads(pickle.dumps(early)))  # from before the profile: not in it
    times.updated(time.perf_counter_ns(), idle=True)
    output = SchedulerOutput.make_empty()
    times.scheduled(time.perf_counter_ns(), output)
    profiler.step_of(pickle.loads(pickle.dumps(output)))
    profiler.profile(False)
    (path,) = tmp_path.glob("*.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = [(e["name"], e["args"].get("after_idle")) for e in events if e.get("cat") == "schedule"]
    assert found == [("update from output", None), ("schedule", True)]
