# SPDX-License-Identifier: Apache-2.0
"""Buckets compile in worker processes, the longest first, and none can stop the others."""

import functools
import sys
from pathlib import Path

import pytest

from neuron_core.graphs.aot import AotTask, compile_ahead

sys.path.insert(0, str(Path(__file__).parent))
import ahead_worker


@pytest.fixture
def compile_all(tmp_path):
    def run(names, jobs=2):
        tasks = [AotTask(name, 0, cost) for cost, name in enumerate(names)]
        make = functools.partial(ahead_worker.Obedient, tmp_path / "journal")
        seen = []
        results = compile_ahead(make, tasks, jobs=jobs, logs=tmp_path / "logs", on_result=seen.append)
        assert sorted(r.task.bucket for r in seen) == sorted(names), "every task is reported once"
        return results

    return run


def test_results_come_in_the_order_asked_for_and_work_starts_with_the_longest(compile_all, tmp_path):
    names = [f"b{index}" for index in range(6)]
    results = compile_all(names, jobs=1)
    assert [result.outcome.graphs for result in results] == [(name,) for name in names]
    assert (tmp_path / "journal").read_text().split() == names[::-1]
    assert all(result.peak_bytes > 1 << 20 and result.seconds >= 0.05 for result in results)


def test_a_failing_bucket_names_its_error_and_log_and_the_others_continue(compile_all):
    results = compile_all(["a", "fails_b4", "c", "breaks_b2", "d"])
    assert [bool(result.error) for result in results] == [False, True, False, True, False]
    assert results[1].error == "fails_b4 has no kernel"
    assert results[3].error == "ZeroDivisionError: a defect"
    assert "rank0-breaks_b2" in results[3].log.name
    assert "Traceback" in results[3].log.read_text()


def test_a_killed_process_costs_its_own_bucket_alone(compile_all):
    results = compile_all(["a", "killed_b8", "b", "c", "killed_b9", "d"])
    assert [result.task.bucket for result in results if result.error] == ["killed_b8", "killed_b9"]
    assert all("memory" in result.error and result.log.exists() for result in results if result.error)


def test_a_worker_that_cannot_be_set_up_is_every_bucket_s_error(tmp_path):
    tasks = [AotTask("a", 0, 1), AotTask("b", 0, 2)]
    results = compile_ahead(ahead_worker.Refuses, tasks, jobs=2, logs=tmp_path)
    assert [result.error for result in results] == ["no such model"] * 2
