# SPDX-License-Identifier: Apache-2.0
"""Random load with aborts, twice what fits, for 16 seconds (nightly: half an hour): right, whole and no larger."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from vllm import SamplingParams

SEQS, LENGTH, BLOCK = 8, 256, 16
MOST_TOKENS = 48
OUTSTANDING = 2 * SEQS
POOL = 30
"""Blocks to use, less than half of what eight running requests come to hold; one request may need 16."""

GROWTH = 0.02
NOISE_BYTES = 4 << 20
"""What the resident size of an idle allocator moves by from one sample to the next; never a limit of its own above
a size of 200 MiB, which every engine has."""


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, engines: Any, tiny_llama: Path) -> Any:
    buckets = {"compiler": "fx", "prefill_buckets": [32, 64], "decode_buckets": [2, 8]}
    return engines(
        tiny_llama,
        dtype="float32",
        max_model_len=LENGTH,
        max_num_seqs=SEQS,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=POOL + 1,
        async_scheduling=request.param,
        additional_config={"neuron_config": buckets},
    )


class Load:
    """Keeps `OUTSTANDING` requests alive and judges each that ends."""

    def __init__(self, engine: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self.engine = engine
        self.prompts, self.answers = prompts, answers
        self.rng = np.random.default_rng(7)
        self.alive: dict[str, tuple[int, int, bool]] = {}
        self.seen: Counter[str] = Counter()

    def add(self) -> None:
        index, count = int(self.rng.integers(len(self.prompts))), int(self.rng.integers(1, MOST_TOKENS + 1))
        plain = self.rng.random() < 0.7
        more = {} if plain else {"temperature": 1.0, "top_p": 0.9, "logprobs": 1, "presence_penalty": 0.5}
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True} | more)
        self.alive[self.engine.add(self.prompts[index], params)] = (index, count, plain)

    def abort(self) -> None:
        victim = sorted(self.alive)[int(self.rng.integers(len(self.alive)))]
        self.engine.engine.abort_request([victim])
        del self.alive[victim]
        self.seen["aborted"] += 1

    def step(self) -> None:
        for name, output in self.engine.step().items():
            if output.finished and name in self.alive:
                index, count, plain = self.alive.pop(name)
                tokens = list(output.outputs[0].token_ids)
                assert len(tokens) == count
                assert not plain or tokens == self.answers[index][:count], self.prompts[index]
                self.seen["finished"] += 1
                self.seen["hit"] += bool(output.num_cached_tokens)

    def turn(self) -> None:
        """Fill up, do a step, and now and then take one away."""
        while len(self.alive) < OUTSTANDING:
            self.add()
        self.step()
        if self.alive and self.rng.random() < 0.04:
            self.abort()
        self.seen["steps"] += 1

    def drain(self) -> None:
        while self.engine.engine.has_unfinished_requests():
            self.step()
        assert not self.alive


def many_prompts() -> list[list[int]]:
    """48 prompts of 1 to 200 tokens, most of which begin as one of three texts does."""
    rng = np.random.default_rng(8)
    texts = [rng.integers(3, 256, 200).tolist() for _ in range(3)]
    prompts = [texts[index % 3][: int(rng.integers(1, 200))] for index in range(40)]
    return prompts + [rng.integers(3, 256, int(rng.integers(1, 200))).tolist() for _ in range(8)]


SHORT = pytest.param(8, id="8s-each")
NIGHT = pytest.param(900, id="15min-each", marks=[pytest.mark.nightly, pytest.mark.timeout(1500)])


@pytest.mark.parametrize("seconds", [SHORT, NIGHT])
def test_nothing_grows_and_nothing_is_lost(engine, tiny_llama, continuations, check_blocks, seconds):
    prompts = many_prompts()
    load = Load(engine, prompts, continuations(tiny_llama, prompts, MOST_TOKENS))
    graphs, preempted = engine.graph_counts(), engine.preemptions
    process = psutil.Process()
    begun = time.monotonic()
    resident: list[tuple[float, int]] = []
    while (spent := time.monotonic() - begun) < seconds:
        for _ in range(10):
            load.turn()
        check_blocks(engine.scheduler)
        resident.append((spent, process.memory_info().rss))
    load.drain()
    engine.check_idle()

    warm = [size for at, size in resident if at >= seconds / 3]
    assert len(warm) >= 10
    before, after = statistics.median(warm[:5]), statistics.median(warm[-5:])
    assert after - before < max(GROWTH * before, NOISE_BYTES), (
        f"{before / 1e6:.1f} MB became {after / 1e6:.1f} MB"
    )
    assert engine.graph_counts() == graphs
    seen = load.seen | Counter(preempted=engine.preemptions - preempted)
    assert seen["finished"] > seen["aborted"] and seen["steps"] > 100
    for event in ("aborted", "hit", "preempted"):
        assert seen[event] >= 5, f"too little of this kind happened: {event} in {dict(seen)}"
    print(f"{dict(seen)}; {before / 1e6:.1f} MB, then {after / 1e6:.1f} MB")
