# SPDX-License-Identifier: Apache-2.0
"""Penalties, biases and bans inside the graph, against arithmetic by hand on logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

VOCAB = 256
EDITS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.3, "presence_penalty": 0.4},
    {"logit_bias": {40: 6.0, 41: 5.5, 42: -100.0}},
    {"allowed_token_ids": list(range(60, 90)), "frequency_penalty": 1.0},
    {"min_tokens": 6, "stop_token_ids": list(range(3, 200))},
    {"bad_words": 5},
    {"bad_words": 5, "repetition_penalty": 1.2, "logit_bias": {50: 3.0}, "min_tokens": 2},
]


@pytest.fixture(scope="module", params=["sync", "async", "async-preempted"])
def engine(request, engines, tiny_llama: Path, tiny_settings: dict[str, Any]) -> Any:
    settings = dict(tiny_settings)
    if request.param != "sync":
        settings["async_scheduling"] = True
    if request.param == "async-preempted":
        settings["num_gpu_blocks_override"] = 24
    return engines(tiny_llama, **settings)


@pytest.fixture(scope="module")
def next_logits(tiny_llama: Path):
    """Logits of the token after a text, by transformers in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.no_grad():
        yield lambda ids: model(torch.tensor([ids])).logits[0, -1].tolist()


def edited(row: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    for token, bias in (params.logit_bias or {}).items():
        row[int(token)] += bias
    banned = set()
    for *before, end in params.bad_words_token_ids or []:
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            banned.add(end)
    if params.allowed_token_ids:
        banned |= set(range(VOCAB)) - set(params.allowed_token_ids)
    if len(output) < params.min_tokens:
        banned |= params.all_stop_token_ids
    for token in range(VOCAB):
        if token in output or token in prompt:
            above = row[token] > 0
            row[token] *= 1 / params.repetition_penalty if above else params.repetition_penalty
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (
            token in output
        )
    return [float("-inf") if token in banned else value for token, value in enumerate(row)]


def continuation(next_logits, prompt: list[int], params: SamplingParams) -> list[int]:
    output: list[int] = []
    while len(output) < params.max_tokens:
        output.append(int(np.argmax(edited(next_logits(prompt + output), params, prompt, output))))
        if output[-1] in params.stop_token_ids:
            break
    return output


def make_params(edits: dict[str, Any], plain: list[int], **changes: Any) -> SamplingParams:
    """``bad_words`` stands for as many ends of the text ``plain``, of one to three tokens each."""
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True} | edits | changes
    count = settings.pop("bad_words", 0)
    params = SamplingParams(**settings)
    if count:  # as vLLM does with words, which this tokenizer could not give back
        params._bad_words_token_ids = [plain[at : at + 1 + at % 3] for at in range(count)]
    return params


@pytest.mark.supports("penalties and logit edits", model="llama")
def test_every_edit_in_one_batch_and_nothing_drawn_on_the_host(
    engine, next_logits, make_prompts, monkeypatch
):
    def forbidden(*_: Any) -> None:
        raise AssertionError("a row was drawn on the host")

    monkeypatch.setattr("vllm_neuron.runner.step._resample", forbidden)
    prompts = make_prompts(len(EDITS), 60, seed=31)
    plain = [continuation(next_logits, p, make_params({}, [])) for p in prompts]
    params = [make_params(edits, text) for edits, text in zip(EDITS, plain, strict=True)]
    expected = [continuation(next_logits, p, each) for p, each in zip(prompts, params, strict=True)]
    assert [text == other for text, other in zip(plain, expected, strict=True)] == [True, *[False] * 9]
    graphs = engine.graph_counts()
    before = engine.preemptions
    assert engine.tokens(prompts, params) == expected
    assert engine.tokens(prompts[::-1], params[::-1], arrive=2)[::-1] == expected
    assert engine.graph_counts() == graphs
    assert engine.preemptions > before or engine.free_blocks > 100  # the small pool preempts


def test_the_same_seed_with_edits_gives_the_same_text_in_any_batch(engine, make_prompts):
    prompts = make_prompts(len(EDITS), 60, seed=32)
    plain = engine.tokens(prompts, SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True))
    params = [
        make_params(edits, text, temperature=1.1, seed=50 + index, top_p=0.95)
        for index, (edits, text) in enumerate(zip(EDITS, plain, strict=True))
    ]
    together = engine.tokens(prompts, params)
    assert engine.tokens(prompts[::-1], params[::-1], arrive=3)[::-1] == together
    assert [engine.tokens([p], [each])[0] for p, each in zip(prompts, params, strict=True)] == together


def test_more_banned_words_than_the_graph_has_room_for(engine, next_logits, make_prompts):
    (prompt,) = make_prompts(1, 30, seed=33)
    plain = continuation(next_logits, prompt, make_params({}, []))
    params = make_params({}, plain)
    params._bad_words_token_ids = [plain[at : at + 2] for at in range(12)] + [[3, 4]] * 60
    expected = continuation(next_logits, prompt, params)
    assert expected != plain
    assert engine.tokens([prompt], params) == [expected]
