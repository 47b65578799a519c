# SPDX-License-Identifier: Apache-2.0
"""Whatever is switched on, greedy fp32 tokens are those of the plain run and of transformers.

The settings are combined so that every pair of values meets; of those, runs of two ranks are nightly, as is the rest of
the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

BLOCK = 16
LENGTH = 1024
NUM_TOKENS = 8
SINGLE_SHOT = LENGTH
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

INTERPRETED = {"compiler": "fx", "decode_buckets": [8]}
"""The graphs are the same ones; compiling five sets of them would take minutes whenever an op changes."""

Values = Mapping[str, Any]

# The first value of each is the plain run's. Another setting is another line here and in `engine_settings`.
AXES: dict[str, tuple[Any, ...]] = {
    "caching": (False, True),
    "segment": (SINGLE_SHOT, 64, 512),
    "contexts": ((), (128, 512)),
    "asynchronous": (False, True),
    "ranks": (1, 2),
}


def whole_product() -> list[Values]:
    return [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def pairs(values: Values) -> set[tuple[Any, ...]]:
    """Every two settings with their values."""
    return set(combinations(values.items(), 2))


def covering_array() -> list[Values]:
    """The plain run, then again and again the combination with most pairs that no other has had."""
    rows = whole_product()
    chosen, missing = rows[:1], set().union(*map(pairs, rows)) - pairs(rows[0])
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def named(values: Values) -> str:
    return "-".join(f"{name}={value}".replace(" ", "") for name, value in values.items())


CHOSEN = covering_array()
OTHERS = [values for values in whole_product() if values not in CHOSEN]


def engine_settings(values: Values) -> dict[str, Any]:
    segment = values["segment"]
    buckets = {
        "prefill_buckets": [segment],
        "decode_context_length_buckets": list(values["contexts"]),
    }
    return {
        "dtype": "float32",
        "max_model_len": LENGTH,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 200,
        "enable_prefix_caching": values["caching"],
        "max_num_batched_tokens": segment,
        "enable_chunked_prefill": segment != SINGLE_SHOT,
        "async_scheduling": values["asynchronous"],
        "tensor_parallel_size": values["ranks"],
        "additional_config": {"neuron_config": INTERPRETED | buckets},
    }


def mixed_prompts() -> list[list[int]]:
    """40 prompts: prefixes of one text, as long as a block or segment and one more or less, and an end of their own."""
    rng = np.random.default_rng(40)
    text = rng.integers(3, 256, 700).tolist()
    borders = (16, 32, 48, 64, 128, 192, 256, 448, 512, 576, 640)
    shared = [length for border in borders for length in (border - 1, border, border + 1)]
    ends = [int(rng.integers(1, 40)) for _ in shared]
    prompts = [
        text[:length] + rng.integers(3, 256, end).tolist() for length, end in zip(shared, ends, strict=True)
    ]
    # The longest comes first, so that a whole segment is computed; whole repetitions of a prompt come last.
    whole = [text, *(rng.permutation(len(prompts)).tolist()), text, text[:512], text[:64], text[:1]]
    mixed = [prompts[item] if isinstance(item, int) else item for item in whole]
    return [*mixed, rng.integers(3, 256, 1).tolist(), rng.integers(3, 256, 100).tolist()]


PROMPTS = mixed_prompts()


def longest_hit(prompt: list[int], others: list[list[int]]) -> int:
    """Most tokens of whole blocks that ``prompt`` can find of ``others``; its last token is always computed."""
    common = [next((i for i, (a, b) in enumerate(zip(prompt, o)) if a != b), len(o)) for o in others]  # noqa: B905
    return max([0, *(min(length, len(prompt) - 1) // BLOCK * BLOCK for length in common)])


@pytest.fixture
def engine(request: pytest.FixtureRequest, engines: Any, long_llama: Path) -> Iterator[Any]:
    """An engine with the combination asked for, shut down at once: two ranks are two processes."""
    made = engines(long_llama, **engine_settings(request.param))
    yield made
    made.check_idle()
    for key in [key for key, kept in engines.made.items() if kept is made]:
        del engines.made[key]
    made.engine.engine_core.shutdown()


@pytest.fixture
def steps(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens computed by each step of the engine."""
    counts: list[int] = []
    schedule = engine.scheduler.schedule

    def counting(*args: Any) -> Any:
        output = schedule(*args)
        counts.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", counting)
    return counts


def decode_steps(worker: Any) -> dict[str, float]:
    """Decode steps of this worker's process since its start, by bucket."""
    from prometheus_client import REGISTRY

    series = (metric for metric in REGISTRY.collect() if metric.name == "vllm_neuron:graph_executions")
    found = {
        sample.labels["bucket_name"]: sample.value
        for metric in series
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["bucket_name"].startswith("decode")
    }
    return {name: count for name, count in found.items() if count}


def check(values: Values, engine: Any, steps: list[int], expected: list[list[int]]) -> None:
    before = engine.graph_counts()
    outputs = engine.run(PROMPTS, PARAMS, arrive=2)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    # The settings meant something: whole segments were computed, and prefixes found where they are kept.
    assert max(steps) == values["segment"] or (values["segment"] == SINGLE_SHOT and max(steps) > 512)
    hits = [output.num_cached_tokens for output in outputs]
    most = [longest_hit(prompt, PROMPTS[:index]) for index, prompt in enumerate(PROMPTS)]
    assert all(hit <= limit for hit, limit in zip(hits, most, strict=True))
    assert sum(hits) > sum(most) // 2 if values["caching"] else not any(hits)
    check_contexts(values, engine, expected)
    assert len(before) == values["ranks"] and engine.graph_counts() == before


def check_contexts(values: Values, engine: Any, expected: list[list[int]]) -> None:
    """Alone, the shortest and the longest prompt decode in the shortest and the longest context there is."""
    ends = [f"_c{context}" for context in (*values["contexts"], LENGTH)] if values["contexts"] else [""]
    by_length = sorted(range(len(PROMPTS)), key=lambda index: len(PROMPTS[index]))
    for index, end in ((by_length[0], ends[0]), (by_length[-1], ends[-1])):
        earlier = engine.core.model_executor.collective_rpc(decode_steps)
        assert engine.tokens([PROMPTS[index]], PARAMS) == [expected[index]]
        now = engine.core.model_executor.collective_rpc(decode_steps)
        for old, new in zip(earlier, now, strict=True):
            assert {name for name in new if new[name] > old.get(name, 0)} == {f"decode_b8{end}"}


def test_every_pair_of_values_meets():
    wanted = {
        ((one, a), (other, b)) for one, other in combinations(AXES, 2) for a in AXES[one] for b in AXES[other]
    }
    assert {pair for values in CHOSEN for pair in pairs(values)} == wanted
    # No fewer combinations could hold the pairs of the two longest axes.
    longest = sorted(map(len, AXES.values()))[-2:]
    assert longest[0] * longest[1] <= len(CHOSEN) <= 2 * longest[0] * longest[1]
    assert CHOSEN[0] == {name: values[0] for name, values in AXES.items()}


def test_the_prompts_are_40_and_share_what_they_should():
    assert len(PROMPTS) == 40
    shared = {longest_hit(prompt, PROMPTS[:index]) for index, prompt in enumerate(PROMPTS)}
    assert {0, 16, 32, 48, 64, 128, 192, 448, 512, 576} <= shared


@pytest.fixture(scope="module")
def expected(long_llama: Path, continuations: Any) -> list[list[int]]:
    return continuations(long_llama, PROMPTS, NUM_TOKENS)


def chosen_run(values: Values) -> Any:
    # Two ranks start in two processes, and test_two_ranks.py compares them with one at every change.
    marks = [pytest.mark.nightly] if values["ranks"] > 1 else []
    return pytest.param(values, values, id=named(values), marks=marks)


@pytest.mark.parametrize(("values", "engine"), [chosen_run(v) for v in CHOSEN], indirect=["engine"])
def test_tokens_are_those_of_the_plain_run(values, engine, steps, expected):
    # The plain run is the first of these, and transformers' tokens are expected of it too.
    check(values, engine, steps, expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("values", "engine"), [(v, v) for v in OTHERS], ids=map(named, OTHERS), indirect=["engine"]
)
def test_tokens_of_every_other_combination(values, engine, steps, expected):
    check(values, engine, steps, expected)
