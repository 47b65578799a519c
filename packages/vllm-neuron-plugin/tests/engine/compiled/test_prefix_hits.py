# SPDX-License-Identifier: Apache-2.0
"""A prefix hit is as long as the arithmetic says: in the reply, in the counters, and in what is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module", params=[512, 64], ids=["whole", "segments-of-64"])
def engine(request: pytest.FixtureRequest, engines: Any, long_llama: Any) -> Any:
    buckets = {
        "compiler": "fx",
        "prefill_buckets": [64, 512][: 1 + (request.param > 64)],
        "decode_buckets": [4],
    }
    return engines(
        long_llama,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=request.param,
        num_gpu_blocks_override=150,
        disable_log_stats=False,
        additional_config={"neuron_config": buckets},
    )


def counters(engine: Any) -> dict[str, float]:
    """Tokens looked up and tokens found, by vLLM's own metrics, summed over the engines of this process."""
    wanted = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")
    found = dict.fromkeys(wanted, 0.0)
    for metric in engine.llm.get_metrics():
        if metric.name in wanted:
            found[metric.name] += metric.value
    return found


class Measured:
    """One request run alone: its output, what the counters say of it, and the prompt tokens computed for it."""

    def __init__(self, engine: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        computed: list[int] = []
        schedule = engine.scheduler.schedule

        def counting(*args: Any) -> Any:
            computed.append((output := schedule(*args)).total_num_scheduled_tokens)
            return output

        before = counters(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "schedule", counting)
            (self.output,) = engine.run([prompt], GREEDY)
        after = counters(engine)
        self.queries, self.hits = (int(after[name] - before[name]) for name in before)
        self.prompt_tokens = sum(computed) - (GREEDY.max_tokens - 1)
        self.tokens = list(self.output.outputs[0].token_ids)


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


@pytest.mark.supports("prefix caching", model="llama")
def test_448_shared_tokens_are_28_blocks(engine, long_llama, continuations, monkeypatch):
    first = text(500, 1)
    second = first[:448] + text(52, 2)
    assert first[448] != second[448]
    expected = continuations(long_llama, [first, second], GREEDY.max_tokens)
    cold, warm = (Measured(engine, prompt, monkeypatch) for prompt in (first, second))
    assert [cold.tokens, warm.tokens] == expected
    assert (cold.queries, cold.hits, cold.prompt_tokens) == (500, 0, 500)
    assert (warm.queries, warm.hits, warm.prompt_tokens) == (500, 448, 52)
    assert (cold.output.num_cached_tokens, warm.output.num_cached_tokens) == (0, 448)


@pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129])
def test_whole_blocks_of_the_shared_prefix_are_found(engine, long_llama, continuations, monkeypatch, shared):
    first = text(140, 100 + shared)
    second = [*first[:shared], 3 + (first[shared] + 1 - 3) % 253, *text(20, 200 + shared)]
    Measured(engine, first, monkeypatch)
    found = Measured(engine, second, monkeypatch)
    hit = shared - shared % BLOCK
    assert (found.queries, found.hits) == (len(second), hit)
    assert (found.output.num_cached_tokens, found.prompt_tokens) == (hit, len(second) - hit)
    assert [found.tokens] == continuations(long_llama, [second], GREEDY.max_tokens)


@pytest.mark.parametrize("length", [1, 16, 17, 32, 33, 64, 65, 128])
def test_a_repeated_prompt_computes_its_last_token_at_least(engine, monkeypatch, length):
    prompt = text(length, 300 + length)
    cold, warm = (Measured(engine, prompt, monkeypatch) for _ in range(2))
    hit = (length - 1) // BLOCK * BLOCK
    assert (cold.hits, warm.hits, warm.prompt_tokens) == (0, hit, length - hit)
    assert warm.tokens == cold.tokens


@pytest.mark.supports("prefix caching", model="llama")
def test_generated_tokens_are_found_too(engine, long_llama, continuations, monkeypatch):
    prompt = text(30, 400)
    (answer,) = continuations(long_llama, [prompt], 24)
    long = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert engine.tokens([prompt], long) == [answer]
    # The last token drawn was never computed: 53 tokens are three blocks.
    found = Measured(engine, prompt + answer + [5], monkeypatch)
    assert found.hits == (30 + 24 - 1) // BLOCK * BLOCK == 48
    assert [found.tokens] == continuations(long_llama, [prompt + answer + [5]], GREEDY.max_tokens)


def test_evicted_blocks_are_not_found(engine, monkeypatch):
    prompt = text(100, 500)
    Measured(engine, prompt, monkeypatch)
    assert Measured(engine, prompt, monkeypatch).hits == 96
    for seed in range(3):  # 149 blocks; each of these takes 63
        Measured(engine, text(1000, 600 + seed), monkeypatch)
    assert Measured(engine, prompt, monkeypatch).hits == 0
