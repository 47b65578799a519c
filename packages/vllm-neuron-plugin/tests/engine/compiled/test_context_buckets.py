# SPDX-License-Identifier: Apache-2.0
"""A decode step runs in the shortest context that holds it, with the tokens it has in the full one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from vllm import SamplingParams

CONTEXT, LENGTH, BLOCK = 128, 256, 16
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": LENGTH,
    "max_num_seqs": 8,
    "max_num_batched_tokens": LENGTH,
    "num_gpu_blocks_override": 200,
}
BUCKETS = {"prefill_buckets": [LENGTH], "decode_buckets": [1, 8]}
# An answer starts, ends, or passes where the short context ends; two stay on either side of it.
LENGTHS = (5, CONTEXT - 25, CONTEXT - 24, CONTEXT - 3, CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 60)
NUM_TOKENS = 25


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[3 + (7 * index + 11 * place) % 250 for place in range(n)] for index, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request, engines, tiny_llama) -> Any:
    neuron = BUCKETS | {"decode_context_length_buckets": [CONTEXT]}
    return engines(
        tiny_llama, **LIMITS, async_scheduling=request.param, additional_config={"neuron_config": neuron}
    )


@pytest.fixture
def labels(engine, monkeypatch) -> Counter[str]:
    """Steps by the bucket name that the metrics are labelled with."""
    found: Counter[str] = Counter()
    observe = engine.runner.metrics.observe_step

    def counting(name: str, **padding: int) -> None:
        found[name] += 1
        observe(name, **padding)

    monkeypatch.setattr(engine.runner.metrics, "observe_step", counting)
    return found


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


@pytest.mark.supports("decode context buckets", model="llama")
def test_tokens_are_those_of_transformers_on_both_sides_of_the_border(
    engine, prompts, tiny_llama, continuations, labels
):
    graphs = engine.graph_counts()
    expected = continuations(tiny_llama, prompts, NUM_TOKENS)
    alone = [engine.tokens([prompt], greedy(NUM_TOKENS))[0] for prompt in prompts]
    together = engine.tokens(prompts, greedy(NUM_TOKENS), arrive=2)
    assert alone == expected and together == expected
    assert engine.graph_counts() == graphs
    names = {f"decode_b{size}_c{context}" for size in (1, 8) for context in (CONTEXT, LENGTH)}
    assert names <= labels.keys() <= names | {f"prefill_s{LENGTH}"}


@pytest.mark.parametrize("length", [CONTEXT - 20, CONTEXT - 1, CONTEXT])
def test_the_label_of_a_step_is_the_context_it_needed(engine, labels, length):
    engine.scheduler.reset_prefix_cache()
    engine.tokens([list(range(3, 3 + length))], greedy(NUM_TOKENS))
    # The prompt's step draws a token. Each of the others puts the token before it into the cache and reads all.
    contexts = [length + 1 + step for step in range(NUM_TOKENS - 1)]
    short = sum(context <= CONTEXT for context in contexts)
    expected = {f"prefill_s{LENGTH}": 1, "decode_b1_c128": short, "decode_b1_c256": len(contexts) - short}
    assert +labels == {name: count for name, count in expected.items() if count}


def test_the_longest_request_of_a_batch_decides_for_all(engine, labels):
    engine.scheduler.reset_prefix_cache()
    engine.tokens([[5, 6, 7], list(range(3, 3 + CONTEXT))], greedy(4))
    assert {name for name in labels if name.startswith("decode")} == {"decode_b8_c256"}
