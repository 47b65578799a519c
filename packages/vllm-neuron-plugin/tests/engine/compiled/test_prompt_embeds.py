# SPDX-License-Identifier: Apache-2.0
"""Prompts given as embeddings, alone and beside tokens: the answers of transformers, whatever the steps look like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 13,  # too few for all prompts, enough for the longest
    "enable_prompt_embeds": True,
    "additional_config": {"neuron_config": {"prefill_buckets": [64], "decode_buckets": [4, 8]}},
}
NUM_TOKENS = 16
LENGTHS = (1, 5, 16, 33, 80, 100, 2, 64)


def greedy(**more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **more)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rows_of(reference: Any) -> Callable[[list[int]], torch.Tensor]:
    """``rows_of(ids)``: the checkpoint's embeddings ``[n, hidden]`` of tokens."""
    return lambda ids: reference.get_input_embeddings().weight.detach()[torch.tensor(ids)].clone()


@pytest.fixture(scope="module")
def continued(reference: Any) -> Callable[[torch.Tensor], list[int]]:
    """``continued(embeds)``: what transformers adds to a prompt of embeddings, greedily."""
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=2)
    reference.generation_config = GenerationConfig()

    @torch.no_grad()
    def ask(embeds: torch.Tensor) -> list[int]:
        return reference.generate(inputs_embeds=embeds.unsqueeze(0), generation_config=settings)[0].tolist()

    return ask


@pytest.fixture(scope="module")
def make(engines: Callable[..., Any], tiny_llama: Path) -> Callable[..., Any]:
    def make(overlap: bool = False, **more: Any) -> Any:
        return engines(tiny_llama, **(LIMITS | more), async_scheduling=overlap)

    return make


def mixed(ids: list[int], embeds: torch.Tensor, is_token: list[bool]) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "prompt_embeds": embeds, "prompt_is_token_ids": is_token}


@pytest.fixture(scope="module")
def asked(rows_of: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Prompts of every kind, and the embeddings of the whole of each: some are no token's."""
    draw = torch.Generator().manual_seed(5)
    prompts: list[Any] = []
    wholes: list[torch.Tensor] = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 250, (length,), generator=draw).tolist()
        noise = 0.2 * torch.randn(length, 64, generator=draw)
        is_token = (torch.rand(length, generator=draw) < 0.5).tolist()
        if number % 4 == 0:
            prompts.append({"prompt_embeds": rows_of(ids)})  # those of tokens
            wholes.append(rows_of(ids))
        elif number % 4 == 1:
            prompts.append({"prompt_embeds": noise})
            wholes.append(noise)
        elif number % 4 == 2:
            prompts.append({"prompt_token_ids": ids})
            wholes.append(rows_of(ids))
        else:  # what stands in for the id where an embedding goes may be no token of the model
            shown = [id_ if is_one else 5000 for id_, is_one in zip(ids, is_token, strict=True)]
            prompts.append(mixed(shown, noise, is_token))
            wholes.append(torch.where(torch.tensor(is_token).unsqueeze(1), rows_of(ids), noise))
    return prompts, wholes


@pytest.mark.supports("prompt embeddings", model="llama")
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("arrive", [0, 2], ids=["together", "staggered"])
def test_answers_are_those_of_transformers(make, asked, continued, overlap, arrive):
    # Two of the prompts are longer than a step; a prompt of one token is a decode step; some are preempted.
    engine = make(overlap)
    prompts, wholes = asked
    before, preempted = engine.graph_counts(), engine.preemptions
    assert engine.tokens(prompts, greedy(), arrive=arrive) == [continued(whole) for whole in wholes]
    assert engine.graph_counts() == before
    assert arrive or engine.preemptions > preempted


def test_equal_embeddings_hit_the_cache_and_others_do_not(make, rows_of, continued):
    engine = make()
    embeds = 0.2 * torch.randn(40, 64, generator=torch.Generator().manual_seed(9))
    changed = embeds.clone()
    changed[20, 3] += 0.5
    outputs = [engine.run([{"prompt_embeds": rows}], greedy())[0] for rows in (embeds, embeds, changed)]
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 16]
    assert [list(output.outputs[0].token_ids) for output in outputs] == [
        continued(rows) for rows in (embeds, embeds, changed)
    ]


def test_a_token_does_not_hit_what_an_embedding_of_zeros_left(make, rows_of, continued):
    engine = make()
    zeros, tokens = torch.zeros(40, 64), rows_of([0] * 40)
    asked = [
        mixed([0] * 40, zeros, [False] * 40),
        mixed([0] * 40, zeros, [True] * 40),
        {"prompt_token_ids": [0] * 40},
        {"prompt_embeds": zeros},
    ]
    expected = [continued(rows) for rows in (zeros, tokens, tokens, zeros)]
    assert expected[0] != expected[1]
    assert [engine.tokens([prompt], greedy())[0] for prompt in asked] == expected


def test_refused_prompts_leave_the_engine_as_it_was(make, asked, continued):
    from vllm.exceptions import VLLMValidationError

    engine = make()
    prompts, wholes = asked
    good = torch.zeros(4, 64)
    bad = good.clone()
    bad[1, 1] = float("nan")
    refused = [
        ({"prompt_embeds": bad}, "not finite"),
        ({"prompt_embeds": torch.zeros(4, 65)}, r"\[4, 65\]"),
        ({"prompt_embeds": torch.zeros(4, 64, dtype=torch.int64)}, "torch.int64"),
        ({"prompt_embeds": torch.zeros(0, 64)}, "empty"),
        ({"prompt_embeds": torch.zeros(129, 64)}, "context length is 128 tokens"),
        (mixed([1, 2, 256, 4], good, [True] * 4), r"prompt_token_ids\[2\] is 256"),
        ({"prompt_token_ids": [1, 2, 3, 4], "prompt_embeds": good}, "prompt_is_token_ids"),
    ]
    for prompt, said in refused:
        with pytest.raises((VLLMValidationError, ValueError), match=said):
            engine.add(prompt, greedy())
    with pytest.raises(VLLMValidationError, match="prompt_logprobs"):
        engine.add({"prompt_embeds": good}, greedy(prompt_logprobs=1))
    engine.check_idle()
    assert engine.tokens(prompts[:2], greedy()) == [continued(whole) for whole in wholes[:2]]


def test_an_engine_without_the_flag_refuses(make, reference, rows_of):
    from vllm.exceptions import VLLMValidationError

    engine = make(enable_prompt_embeds=False)
    with pytest.raises(ValueError, match="--enable-prompt-embeds"):
        engine.add({"prompt_embeds": rows_of([5, 6])}, greedy())
    # Another front end may hand over what it has rendered itself.
    with pytest.raises(VLLMValidationError, match="--enable-prompt-embeds"):
        engine.add({"type": "embeds", "prompt_embeds": rows_of([5, 6])}, greedy())
    assert len(engine.tokens([[5, 6]], greedy())[0]) == NUM_TOKENS


def test_penalties_and_seeds_are_those_of_the_same_output(make, rows_of):
    # An embedding is no token: only what is drawn counts, as for a prompt whose tokens are never drawn.
    engine = make()
    ids = [7, 8, 9, 250, 251]
    drawn = {}
    for name, prompt in {"tokens": ids, "embeds": {"prompt_embeds": rows_of(ids)}}.items():
        banned = {"logit_bias": dict.fromkeys(ids, -100.0)}
        drawn[name] = engine.tokens(
            [prompt] * 3,
            [
                greedy(frequency_penalty=0.9, presence_penalty=0.5),
                greedy(repetition_penalty=1.7, **banned),
                greedy().__class__(temperature=1, seed=4, max_tokens=NUM_TOKENS, ignore_eos=True),
            ],
        )
    assert drawn["tokens"] == drawn["embeds"]


@pytest.mark.nightly
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_two_ranks_give_the_answers_of_one(make, asked, continued, overlap):
    engine = make(overlap, tensor_parallel_size=2)
    prompts, wholes = asked
    assert engine.tokens(prompts, greedy(), arrive=2) == [continued(whole) for whole in wholes]
