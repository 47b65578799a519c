# SPDX-License-Identifier: Apache-2.0
"""A state machine of arrivals, aborts, preemptions and prefix hits over the real scheduler and block manager.

The worker is replaced by its memory: for every place of every block, the text whose last token was written
there. A request that reads another text than its own holds a block that it should not hold.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

BLOCK = 16
LENGTH = 64
CHUNK = 32
MAX_CONSECUTIVE = 3
SAMPLED = 7  # by the harness, always
TEXTS = [[20 + (text * 31 + place * 7) % 97 for place in range(LENGTH)] for text in range(2)]


class Memory:
    """What a worker knows and what its KV cache holds, from what the scheduler tells it and nothing else."""

    def __init__(self, requests: dict[str, Any]) -> None:
        self.requests = requests
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.written: dict[int, int] = {}
        self._texts: dict[str, list[int]] = {}
        self.hits = self.resumed = 0

    def text(self, name: str, length: int) -> list[int]:
        """For each of the first ``length`` places, a hash of the text that ends there."""
        texts = self._texts.setdefault(name, [])
        prompt = self.requests[name].prompt_token_ids
        for place in range(len(texts), length):
            token = prompt[place] if place < len(prompt) else SAMPLED
            texts.append(hash((texts[-1] if texts else None, token)))
        return texts[:length]

    def run(self, step: Any) -> None:
        """Do a step: all writes, then all reads, as each layer does."""
        self._update(step)
        counts = step.num_scheduled_tokens
        slots = [
            slot for name, count in counts.items() for slot in self._slots(name, self.computed[name], count)
        ]
        assert len(slots) == len(set(slots)), "two tokens are written to one place"
        for name, count in counts.items():
            done = self.computed[name]
            text = self.text(name, done + count)
            self.written |= dict(zip(self._slots(name, done, count), text[done:], strict=True))
        for name, count in counts.items():
            reach = self.computed[name] + count
            read = [self.written.get(slot) for slot in self._slots(name, 0, reach)]
            assert read == self.text(name, reach), f"{name} reads what is not its text"

    def _slots(self, name: str, begin: int, count: int) -> list[int]:
        table = self.tables[name]
        assert 0 not in table, "block 0 is nobody's"
        return [table[place // BLOCK] * BLOCK + place % BLOCK for place in range(begin, begin + count)]

    def _update(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self.tables.pop(name, None)
        for new in step.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.computed[new.req_id] = new.num_computed_tokens
            self.hits += new.num_computed_tokens > 0
        cached = step.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            added = list(blocks[0]) if blocks else []
            resumed = name in cached.resumed_req_ids
            self.tables[name] = added if resumed else self.tables[name] + added
            self.computed[name] = cached.num_computed_tokens[index]
            self.resumed += resumed


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what clients and memory pressure do; invariants are what must hold after each of them."""

    make: ClassVar[Any]
    check_blocks: ClassVar[Any]
    seen: ClassVar[Counter[str]]

    @initialize(spare_blocks=st.integers(0, 5))
    def start(self, spare_blocks: int) -> None:
        # The least pool there can be holds one request of the whole length, and the null block.
        self.harness = type(self).make(num_blocks=LENGTH // BLOCK + 1 + spare_blocks)
        self.memory = Memory(self.harness.requests)
        self.aborted: set[str] = set()
        self.empty = 0

    @rule(
        text=st.integers(0, 1),
        shared=st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 48, 62]),
        own=st.integers(1, 20),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
    )
    def arrive(self, text: int, shared: int, own: int, max_tokens: int, priority: int) -> None:
        prompt = [*TEXTS[text][:shared], *[120 + len(self.harness.requests) % 100] * own][: LENGTH - 1]
        name = f"r{len(self.harness.requests)}"
        self.harness.add(name, prompt, min(max_tokens, LENGTH - len(prompt)), priority)

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        alive = sorted(self.harness.scheduler.requests)
        self._abort(alive[which % len(alive)])

    @precondition(lambda self: self.harness.scheduler.running)
    @rule()
    def abort_the_one_that_runs_longest(self) -> None:
        self._abort(self.harness.scheduler.running[0].request_id)

    def _abort(self, name: str) -> None:
        self.harness.abort(name)
        self.aborted.add(name)
        self.seen["aborts"] += 1

    @precondition(lambda self: self.harness.scheduler.running)
    @rule()
    def preempt_all(self) -> None:
        assert self.harness.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.seen["forced preemptions"] += 1

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        output = self.harness.step()
        self.memory.run(output)
        self.seen["steps"] += 1
        waits = self.harness.scheduler.has_unfinished_requests() and not output.num_scheduled_tokens
        self.empty = self.empty + 1 if waits else 0
        # A failed admission, and with asynchronous scheduling a step whose tokens are all in flight.
        assert self.empty <= 1 + self.harness.depth, "no request makes progress"

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        type(self).check_blocks(self.harness.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        alive = list(self.harness.scheduler.requests.values())
        # Alone, a request needs its chunks and its tokens in steps; preempted by each of the others, again.
        bound = sum(math.ceil(LENGTH / CHUNK) + request.max_tokens for request in alive) * (len(alive) + 1)
        for _ in range(2 * bound + 4):
            if not self.harness.scheduler.has_requests():
                break
            self._step()
        self.harness.finish(limit=5)
        self.harness.check_idle()
        for name, request in self.harness.requests.items():
            finished = request.num_output_tokens == request.max_tokens
            assert request.is_finished() and (finished or name in self.aborted), name
        self.seen["preemptions"] += sum(r.num_preemptions for r in self.harness.requests.values())
        self.seen["hits"] += self.memory.hits
        self.seen["resumed"] += self.memory.resumed


# The same examples each time: of so few, some draws would have none of the rarer events.
FEW = {"max_examples": 50, "stateful_step_count": 40, "derandomize": True, "database": None}
MANY = {"max_examples": 500, "stateful_step_count": 120}


@pytest.mark.parametrize(
    "size", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2])
def test_no_block_is_lost_or_shared_wrongly_and_every_request_ends(
    make_scheduler, check_blocks, depth, policy, size
):
    def make(num_blocks: int) -> Any:
        return make_scheduler(
            num_blocks=num_blocks,
            depth=depth,
            max_model_len=LENGTH,
            max_num_batched_tokens=CHUNK,
            scheduling_policy=policy,
            enable_prefix_caching=True,
            neuron={"prefill_buckets": [CHUNK], "max_consecutive_prefills": MAX_CONSECUTIVE},
        )

    seen: Counter[str] = Counter()
    parts = {"make": staticmethod(make), "check_blocks": staticmethod(check_blocks), "seen": seen}
    # The fixtures only build things: nothing of one example is left in the next.
    quick = settings(deadline=None, suppress_health_check=list(HealthCheck), **size)
    run_machine(type("Machine", (SchedulerMachine,), parts), settings=quick)
    assert seen["steps"] > size["max_examples"]
    for event in ("aborts", "forced preemptions", "preemptions", "hits", "resumed"):
        assert seen[event] > 0, f"nothing of this kind happened: {event} in {dict(seen)}"
