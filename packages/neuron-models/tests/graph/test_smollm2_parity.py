# SPDX-License-Identifier: Apache-2.0
"""The real SmolLM2-135M-Instruct in fp32 continues prompts with transformers' own tokens."""

import pytest
import torch

NEW_TOKENS = 16
PROMPTS = [
    "What is the capital of France?",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
]


@pytest.fixture(scope="module")
def folder(driver):
    return driver.smollm2()


@pytest.fixture(scope="module")
def prompts(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[0]}], add_generation_prompt=True, return_dict=True
    )
    return [chat["input_ids"], *(tokenizer.encode(text) for text in PROMPTS[1:])]


@pytest.fixture(scope="module")
def expected(folder, prompts):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return [model.generate(torch.tensor([p]), **settings)[0, len(p) :].tolist() for p in prompts]


def test_greedy_tokens_are_those_of_transformers_generate(driver, folder, prompts, expected):
    runner = driver.PagedRunner.load(folder, num_seqs=3, max_len=128, tokens=128, block_size=16)
    tokens = runner.prefill(prompts, "greedy")["tokens"].tolist()
    generated = [[token] for token in tokens]
    for _ in range(NEW_TOKENS - 1):
        tokens = runner.decode(tokens, "greedy")["tokens"].tolist()
        for row, token in zip(generated, tokens, strict=True):
            row.append(token)
    assert generated == expected


def test_the_chat_answer_is_paris(folder, expected):
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(folder).decode(expected[0])
    assert text.startswith("The capital of France is Paris.")
