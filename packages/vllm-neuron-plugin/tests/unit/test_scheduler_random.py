# SPDX-License-Identifier: Apache-2.0
"""Random arrivals, aborts and tiny block pools: no mixed step, nobody starves, all is free at the end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MAX_MODEL_LEN = 64
MAX_CONSECUTIVE = 3
WHOLE_CONTEXT_BLOCKS = MAX_MODEL_LEN // 16

arrivals = st.tuples(
    st.just("add"), st.integers(1, MAX_MODEL_LEN - 1), st.integers(1, 12), st.integers(0, 2), st.booleans()
)
aborts = st.tuples(st.just("abort"), st.integers(0, 30))
steps = st.tuples(st.just("step"), st.integers(1, 6))
scripts = st.lists(st.one_of(arrivals, arrivals, aborts, steps), max_size=30)


class Watcher:
    """Judges each step by what earlier steps said, not by the scheduler's own idea of a phase."""

    def __init__(self, harness, max_rows, max_tokens):
        self.harness = harness
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.decoding: set[str] = set()
        self.skipped: dict[str, int] = {}

    def step(self):
        output = self.harness.step()
        counts = output.num_scheduled_tokens
        self.decoding -= output.preempted_req_ids or set()
        kinds = {name: "decode" if name in self.decoding else "prefill" for name in counts}
        assert len(set(kinds.values())) <= 1, f"mixed step {counts} {kinds}"
        if "prefill" in kinds.values():
            assert len(counts) <= self.max_rows and sum(counts.values()) <= self.max_tokens
        else:
            assert all(count == 1 for count in counts.values())
        self._watch_starvation(counts)
        for name in counts:
            if not self.harness.requests[name].is_prefill_chunk:
                self.decoding.add(name)

    def _watch_starvation(self, counts):
        alive = self.harness.scheduler.requests
        for name in self.decoding & alive.keys():
            request = alive[name]
            done = request.num_output_tokens + request.num_output_placeholders >= request.max_tokens
            self.skipped[name] = 0 if name in counts or done else self.skipped.get(name, 0) + 1
            # One more than the longest row of prefills: the step after a failed admission is empty.
            assert self.skipped[name] <= MAX_CONSECUTIVE + 1, f"{name} starves"


def play(harness, watcher, script):
    for action, *values in script:
        if action == "add":
            length, max_tokens, priority, shared = values
            prompt = [5] * length if shared else length
            harness.add(
                f"r{len(harness.requests)}", prompt, min(max_tokens, MAX_MODEL_LEN - length), priority
            )
        elif action == "abort" and harness.requests:
            harness.abort(f"r{values[0] % len(harness.requests)}")
        elif action == "step":
            for _ in range(values[0]):
                watcher.step()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts, spare_blocks=st.integers(0, 6), reserve=st.booleans())
def test_every_request_ends_and_every_block_is_free(
    make_scheduler, depth, policy, script, spare_blocks, reserve
):
    harness = make_scheduler(
        num_blocks=WHOLE_CONTEXT_BLOCKS + 1 + spare_blocks,
        depth=depth,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=32,
        scheduling_policy=policy,
        scheduler_reserve_full_isl=reserve,
        enable_prefix_caching=True,
        neuron={"prefill_buckets": [32], "max_prefill_seqs": 3, "max_consecutive_prefills": MAX_CONSECUTIVE},
    )
    watcher = Watcher(harness, max_rows=3, max_tokens=32)
    play(harness, watcher, script)
    for _ in range(3000):
        if not harness.scheduler.has_requests():
            break
        watcher.step()
    harness.finish(limit=5)
    harness.check_idle()
    aborted = {f"r{v[0] % max(len(harness.requests), 1)}" for a, *v in script if a == "abort"}
    for name, request in harness.requests.items():
        assert request.is_finished()
        if name not in aborted and request.get_finished_reason().name != "ABORT":
            assert request.num_output_tokens == request.max_tokens
