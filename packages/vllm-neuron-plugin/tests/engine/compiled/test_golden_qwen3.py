# SPDX-License-Identifier: Apache-2.0
"""Greedy fp32 text of a random Qwen3 (query and key norms, heads wider than hidden / heads) equals transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def prompts(make_prompts: Any) -> list[list[int]]:
    return [[7], [9] * 208, *make_prompts(30, 200, seed=3)]


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path, prompts: list[list[int]], continuations: Any) -> list[list[int]]:
    return continuations(tiny_qwen3, prompts, PARAMS.max_tokens)


@pytest.fixture(scope="module")
def settings(tiny_settings: dict[str, Any]) -> dict[str, Any]:
    return tiny_settings | {"skip_tokenizer_init": True}


@pytest.mark.supports("greedy tokens equal to transformers", model="qwen3")
@pytest.mark.supports("continuous batching", model="qwen3")
def test_together_with_staggered_arrivals(engines, tiny_qwen3, settings, prompts, expected):
    assert engines(tiny_qwen3, **settings).tokens(prompts, PARAMS, arrive=2) == expected


def test_alone(engines, tiny_qwen3, settings, prompts, expected):
    engine = engines(tiny_qwen3, **settings)
    assert [engine.tokens([prompt], PARAMS)[0] for prompt in prompts] == expected


@pytest.mark.supports("preemption", model="qwen3")
@pytest.mark.supports("asynchronous scheduling", model="qwen3")
@pytest.mark.parametrize("scheduling", [{}, {"async_scheduling": True}], ids=["sync", "async"])
def test_preempted(engines, tiny_qwen3, settings, prompts, expected, scheduling):
    engine = engines(tiny_qwen3, **settings | {"num_gpu_blocks_override": 20} | scheduling)
    assert engine.tokens(prompts, PARAMS) == expected
    assert engine.preemptions > 0
