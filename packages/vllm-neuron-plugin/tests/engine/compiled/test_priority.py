# SPDX-License-Identifier: Apache-2.0
"""The ``priority`` policy on an engine: the urgent overtake, and whom they displace still answers right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

URGENT, USUAL, IDLE = -1, 0, 5
BUCKETS = {"compiler": "fx", "prefill_buckets": [128], "decode_buckets": [2]}


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def make_engine(request: pytest.FixtureRequest, engines: Any, tiny_llama: Path) -> Any:
    """``make_engine(policy, num_blocks)``: two requests at a time, with that many blocks to use."""

    def make(policy: str, num_blocks: int) -> Any:
        return engines(
            tiny_llama,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=2,
            max_num_batched_tokens=128,
            num_gpu_blocks_override=num_blocks + 1,
            scheduling_policy=policy,
            async_scheduling=request.param,
            additional_config={"neuron_config": BUCKETS},
        )

    return make


def greedy(count: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )


class Race:
    """Requests of one engine, and in which order they end."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], count: int, priority: int) -> None:
        self.engine.engine.add_request(name, {"prompt_token_ids": prompt}, greedy(count), priority=priority)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for name, output in self.engine.step().items():
                self.tokens[name] = list(output.outputs[0].token_ids)

    def finish(self) -> list[str]:
        """Run to the end; the names in the order they ended."""
        while self.engine.engine.has_unfinished_requests():
            self.step()
        return list(self.tokens)


@pytest.mark.supports("priority scheduling", model="llama")
@pytest.mark.parametrize(
    ("policy", "order"), [("priority", ["urgent", "usual", "idle"]), ("fcfs", ["idle", "usual", "urgent"])]
)
def test_waiting_requests_start_by_priority(
    make_engine, tiny_llama, make_prompts, continuations, policy, order
):
    race = Race(make_engine(policy, num_blocks=40))
    prompts = make_prompts(5, 20, seed=70)
    for number, prompt in enumerate(prompts[:2]):  # both places are taken for a while
        race.add(f"running{number}", prompt, 12 + 30 * number, URGENT)
    race.step(3)
    waiting = {"idle": IDLE, "usual": USUAL, "urgent": URGENT}
    for (name, priority), prompt in zip(waiting.items(), prompts[2:], strict=True):
        race.add(name, prompt, 8, priority)
    ended = race.finish()
    assert [name for name in ended if name in waiting] == order
    expected = continuations(tiny_llama, prompts, 42)
    for name, count, tokens in zip(
        ["running0", "running1", *waiting], (12, 42, 8, 8, 8), expected, strict=True
    ):
        assert race.tokens[name] == tokens[:count], name


@pytest.mark.supports("priority scheduling", model="llama")
def test_the_urgent_displace_a_running_request_which_ends_with_its_own_text(
    make_engine, tiny_llama, make_prompts, continuations
):
    # Ten blocks. Both end with 100 tokens, seven blocks each: the second to come is the one that stays.
    engine = make_engine("priority", num_blocks=10)
    preempted = engine.preemptions
    race = Race(engine)
    prompts = [[*prompt, *range(3, 63)][:60] for prompt in make_prompts(2, 5, seed=71)]
    race.add("idle", prompts[0], 40, IDLE)
    race.step(4)
    (idle,) = engine.scheduler.running
    race.add("urgent", prompts[1], 40, URGENT)
    assert race.finish() == ["urgent", "idle"]
    assert idle.num_preemptions == engine.preemptions - preempted > 0
    assert [race.tokens["idle"], race.tokens["urgent"]] == continuations(tiny_llama, prompts, 40)


def test_first_come_first_served_displaces_the_last(make_engine, tiny_llama, make_prompts, continuations):
    engine = make_engine("fcfs", num_blocks=10)
    race = Race(engine)
    prompts = [[*prompt, *range(3, 63)][:60] for prompt in make_prompts(2, 5, seed=72)]
    race.add("first", prompts[0], 40, IDLE)
    race.step(4)
    (first,) = engine.scheduler.running
    race.add("last", prompts[1], 40, URGENT)
    assert race.finish() == ["first", "last"]
    assert first.num_preemptions == 0
    assert [race.tokens["first"], race.tokens["last"]] == continuations(tiny_llama, prompts, 40)
