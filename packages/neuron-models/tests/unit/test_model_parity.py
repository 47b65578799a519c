# SPDX-License-Identifier: Apache-2.0
"""Tiny random models against transformers in fp32, over the paged cache."""

import pytest
import torch

ROPE_BASE = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "default": ("llama", {}),
    "linear": ("llama", {"rope_parameters": ROPE_BASE | {"rope_type": "linear", "factor": 4.0}}),
    "llama3": ("llama", {"rope_parameters": ROPE_BASE | LLAMA3}),
    "yarn": (
        "llama",
        {
            "rope_parameters": ROPE_BASE
            | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        },
    ),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "no-grouping": ("llama", {"num_key_value_heads": 4}),
    "head-dim": ("llama", {"head_dim": 24}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
PROMPTS = [[5, 17, 99, 3, 42], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [100, 0, 1]]
CONTINUATIONS = [[1, 2, 3], [50, 60, 70], [9, 9, 9], [33, 44, 55]]


def reference_logits(reference, tokens):
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def pair(request, driver, tmp_path):
    family, changes = request.param
    config = getattr(driver, f"{family}_config")(**changes)
    reference = driver.write_checkpoint(config, tmp_path)
    return reference, driver.PagedRunner.load(tmp_path)


@pytest.mark.supports("greedy tokens equal to transformers", model="llama")
@pytest.mark.supports("greedy tokens equal to transformers", model="qwen3")
@pytest.mark.supports("RoPE scaling", model="llama")
def test_prefill_then_decode_equals_transformers(pair):
    reference, runner = pair
    out = runner.prefill(PROMPTS)
    everywhere = runner.all_logits(out["hidden_states"])
    at = 0
    for row, prompt in enumerate(PROMPTS):
        expected = reference_logits(reference, prompt)
        torch.testing.assert_close(everywhere[at : at + len(prompt)], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out["logits"][row], expected[-1], atol=1e-4, rtol=1e-4)
        assert out["tokens"][row] == expected[-1].argmax()
        at += len(prompt)
    for step, tokens in enumerate(zip(*CONTINUATIONS, strict=True)):
        out = runner.decode(list(tokens))
        for row, prompt in enumerate(PROMPTS):
            expected = reference_logits(reference, prompt + CONTINUATIONS[row][: step + 1])[-1]
            torch.testing.assert_close(out["logits"][row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.supports("chunked prefill", model="llama")
@pytest.mark.supports("chunked prefill", model="qwen3")
def test_chunked_prefill_equals_whole_prefill(pair):
    reference, runner = pair
    runner.prefill([PROMPTS[0], PROMPTS[2][:4]])
    out = runner.prefill([CONTINUATIONS[0], PROMPTS[2][4:]])
    for row, tokens in enumerate((PROMPTS[0] + CONTINUATIONS[0], PROMPTS[2])):
        expected = reference_logits(reference, tokens)[-1]
        torch.testing.assert_close(out["logits"][row], expected, atol=1e-4, rtol=1e-4)


def test_greedy_variant_gives_the_sample_variants_tokens_at_temperature_zero(driver, tmp_path):
    reference = driver.write_checkpoint(driver.llama_config(), tmp_path)
    tokens = driver.PagedRunner.load(tmp_path).prefill(PROMPTS, "greedy")["tokens"]
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == [int(reference_logits(reference, p)[-1].argmax()) for p in PROMPTS]


@pytest.mark.parametrize("rope", [LLAMA3, {"rope_type": "linear", "factor": 2.0}], ids=["llama3", "linear"])
def test_rotary_table_is_transformers_table(driver, rope):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from neuron_models.rope import RotaryTable

    config = driver.llama_config(rope_parameters=ROPE_BASE | rope)
    positions = torch.tensor([0, 1, 17, 63], dtype=torch.int32)
    cos, sin = RotaryTable(config, config.head_dim)(positions)
    their_cos, their_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    torch.testing.assert_close(torch.cat((cos, cos), -1), their_cos[0], atol=0, rtol=0)
    torch.testing.assert_close(torch.cat((sin, sin), -1), their_sin[0], atol=0, rtol=0)
