# SPDX-License-Identifier: Apache-2.0
"""The activations that estimate and budget count are no less than what real steps allocate, and not much more."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from neuron_core.activations import activation_bytes, program_bytes
from neuron_core.graphs.model_programs import ModelPrograms


def allocated(run: Any) -> int:
    """Most bytes that ``run`` holds at one time, as torch's allocator reports them to its profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    now = most = 0
    for _, size in sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ):
        now += size
        most = max(most, now)
    return most


def test_no_step_allocates_more_than_its_bound(tiny):
    executor = tiny.runner.executor
    programs = ModelPrograms(executor.model, executor.plan, num_blocks=1)
    most_of_all = 0
    for bucket, variant in programs.wanted():
        values = programs.padding(bucket)
        needed = programs.program(bucket, variant).inputs()
        given = sum(value.nbytes for name, value in values.items() if name in needed)
        with torch.no_grad():
            most = allocated(
                lambda bucket=bucket, variant=variant, values=values: executor.run(bucket, variant, values)
            )
        bound = program_bytes(programs.program(bucket, variant), programs.specs(bucket))
        assert 0 < most + given <= bound, (bucket.name, variant)
        most_of_all = max(most_of_all, most + given)
    # Counted as if a part's values lived to its end and the results of the step before as well.
    assert most_of_all <= activation_bytes(executor.model, executor.plan) <= 4 * most_of_all
