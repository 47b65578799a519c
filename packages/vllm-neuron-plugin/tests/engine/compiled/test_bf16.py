# SPDX-License-Identifier: Apache-2.0
"""bfloat16 SmolLM2 stays as near to fp32 as transformers' bfloat16 does, and no text depends on its neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(engines: Any, smollm2: Path, smollm2_settings: dict[str, Any]) -> Any:
    return engines(smollm2, **smollm2_settings, dtype="bfloat16")


@pytest.fixture(scope="module")
def texts(golden_prompts: list[list[int]], golden: list[list[int]]) -> list[list[int]]:
    """The golden prompts with what fp32 adds to them."""
    return [prompt + added for prompt, added in zip(golden_prompts, golden, strict=True)]


def log_probs(folder: Path, dtype: torch.dtype, texts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' ``[len - 1, V]`` log-probabilities of the next token along each text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return [model(torch.tensor([t])).logits[0, :-1].float().log_softmax(-1) for t in texts]


def engine_log_probs(engine: Any, texts: list[list[int]]) -> list[torch.Tensor]:
    """The same of the engine: what its logits graph gives while it scores each text as a prompt."""
    executor, seen = engine.runner.executor, []
    original = executor.logits

    def recording(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(original(hidden))
        return seen[-1]

    executor.logits = recording
    found = []
    try:
        for text in texts:
            seen.clear()
            (output,) = engine.run([text], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
            found.append(torch.cat(seen).log_softmax(-1))
            reported = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
            given = found[-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(reported), given)
    finally:
        executor.logits = original
    return found


def divergence(reference: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Mean Kullback-Leibler divergence in nats of ``other`` from ``reference``, over all positions."""
    each = [(r.exp() * (r - o)).sum(-1) for r, o in zip(reference, other, strict=True)]
    return float(torch.cat(each).mean())


def agreement(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    same = [a.argmax(-1) == b.argmax(-1) for a, b in zip(one, other, strict=True)]
    return float(torch.cat(same).float().mean())


def check_nearness(engine: Any, folder: Path, texts: list[list[int]]) -> None:
    exact = log_probs(folder, torch.float32, texts)
    peer = log_probs(folder, torch.bfloat16, texts)
    ours = engine_log_probs(engine, texts)
    assert agreement(peer, ours) >= 0.97
    assert divergence(exact, ours) <= 1.1 * divergence(exact, peer)


@pytest.mark.supports("bfloat16", model="llama")
def test_teacher_forced_choices_and_divergence(engine, smollm2, texts):
    check_nearness(engine, smollm2, texts[3:24:2])


@pytest.mark.nightly
def test_teacher_forced_choices_and_divergence_on_every_text(engine, smollm2, texts):
    check_nearness(engine, smollm2, texts)


def test_no_text_depends_on_its_batch(engine, golden_prompts):
    # The CPU device sums in an order that does not depend on the batch, so even bfloat16 ties fall alike.
    prompts = golden_prompts[::3]
    alone = [engine.tokens([prompt], GREEDY)[0] for prompt in prompts]
    assert engine.tokens(prompts, GREEDY) == alone
    assert engine.tokens(prompts[::-1], GREEDY, arrive=2)[::-1] == alone
