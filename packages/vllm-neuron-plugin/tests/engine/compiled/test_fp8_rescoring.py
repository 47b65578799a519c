# SPDX-License-Identifier: Apache-2.0
"""Case F1: text scored as a prompt has the probabilities it had while it was generated, at every position.

The cases are vllm-project/vllm#54035 and sgl-project/sglang#25790: with an FP8 cache the two disagreed from absolute
position 97 on. Here a token attends to what the cache holds even of its own step, so nothing is left to differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams

PROMPT = [5, 17, 99, 3]
GENERATED = 224
STEP_POSITION = 97


def settings(kv_cache_dtype: str, segment: int) -> dict[str, Any]:
    """An engine that scores a text ``segment`` tokens at a time."""
    buckets = {"compiler": "fx", "prefill_buckets": [segment], "decode_buckets": [1]}
    return {
        "dtype": "bfloat16",
        "kv_cache_dtype": kv_cache_dtype,
        "max_model_len": 256,
        "max_num_seqs": 1,
        "max_num_batched_tokens": segment,
        "num_gpu_blocks_override": 40,
        "additional_config": {"neuron_config": buckets},
    }


def twice(engine: Any, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities ``[224]`` of the tokens that follow ``prompt``: as generated, and as scored."""
    generate = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, logprobs=0)
    (output,) = (done.outputs[0] for done in engine.run([prompt], generate))
    tokens = list(output.token_ids)
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (scored,) = engine.run([prompt + tokens], score)
    assert len(tokens) == GENERATED and len(scored.prompt_logprobs) == len(prompt) + GENERATED
    pairs = (output.logprobs, scored.prompt_logprobs[len(prompt) :])
    generated, rescored = (
        [entry[token].logprob for entry, token in zip(each, tokens, strict=True)] for each in pairs
    )
    return torch.tensor(generated), torch.tensor(rescored)


def check_no_step(generated: torch.Tensor, rescored: torch.Tensor) -> None:
    """Not a bit of difference: the CPU device sums a bfloat16 row in the same order in every batch."""
    error = (generated - rescored).abs()
    early, late = error[: STEP_POSITION - len(PROMPT)], error[STEP_POSITION - len(PROMPT) :]
    assert error.max() == 0.0, f"before {STEP_POSITION}: {early.max()}, from there on: {late.max()}"


@pytest.mark.parametrize("segment", [256, pytest.param(64, marks=pytest.mark.nightly)])
def test_f1_generating_and_scoring_agree_at_every_position(engines, tiny_llama, segment):
    found = {kind: twice(engines(tiny_llama, **settings(kind, segment)), PROMPT) for kind in ("auto", "fp8")}
    for pair in found.values():
        check_no_step(*pair)
    assert (found["auto"][0][:8] - found["fp8"][0][:8]).abs().max() > 1e-3, "the cache is not FP8"


@pytest.mark.nightly
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_f1_holds_for_a_real_model_with_compiled_graphs(engines, smollm2, smollm2_settings, kv_cache_dtype):
    engine = engines(smollm2, **smollm2_settings, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    prompt = engine.llm.get_tokenizer().encode("The fish swallowed Jonah")
    assert len(prompt) >= len(PROMPT)
    check_no_step(*twice(engine, prompt[: len(PROMPT)]))
