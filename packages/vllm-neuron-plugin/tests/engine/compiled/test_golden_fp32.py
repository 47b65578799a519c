# SPDX-License-Identifier: Apache-2.0
"""Greedy fp32 text of the real SmolLM2 is, token for token, what transformers' ``generate`` gives."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

SMALL_POOL_TOKENS = 960
"""Room for two requests of the whole length: 16 running ones must preempt each other."""

PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def settings(smollm2_settings: dict[str, Any]) -> dict[str, Any]:
    return smollm2_settings | {"dtype": "float32"}


@pytest.mark.supports("greedy tokens equal to transformers", model="llama")
@pytest.mark.supports("continuous batching", model="llama")
@pytest.mark.parametrize("block_size", [16, pytest.param(32, marks=pytest.mark.nightly)])
def test_all_together_with_staggered_arrivals(engines, smollm2, settings, golden_prompts, golden, block_size):
    engine = engines(smollm2, **settings, block_size=block_size)
    assert engine.tokens(golden_prompts, PARAMS, arrive=3) == golden
    assert engine.preemptions == 0


@pytest.mark.supports("asynchronous scheduling", model="llama")
def test_asynchronous_scheduling(engines, smollm2, settings, golden_prompts, golden):
    engine = engines(smollm2, **settings, block_size=16, async_scheduling=True)
    assert engine.tokens(golden_prompts[::4], PARAMS, arrive=3) == golden[::4]


def test_four_prompts_alone(engines, smollm2, settings, golden_prompts, golden):
    engine = engines(smollm2, **settings, block_size=16)
    for index in range(7, 32, 8):
        assert engine.tokens([golden_prompts[index]], PARAMS) == [golden[index]], len(golden_prompts[index])


@pytest.mark.nightly
@pytest.mark.parametrize("block_size", [16, 32])
def test_every_prompt_alone(engines, smollm2, settings, golden_prompts, golden, block_size):
    engine = engines(smollm2, **settings, block_size=block_size)
    assert [engine.tokens([prompt], PARAMS)[0] for prompt in golden_prompts] == golden


@pytest.mark.supports("preemption", model="llama")
@pytest.mark.parametrize("block_size", [16, pytest.param(32, marks=pytest.mark.nightly)])
def test_a_pool_so_small_that_requests_are_preempted(
    engines, smollm2, settings, golden_prompts, golden, block_size
):
    pool = {"num_gpu_blocks_override": SMALL_POOL_TOKENS // block_size, "block_size": block_size}
    engine = engines(smollm2, **settings | pool)
    assert engine.tokens(golden_prompts[1::2], PARAMS) == golden[1::2]
    assert engine.preemptions > 0
