# SPDX-License-Identifier: Apache-2.0
"""Public bug reports of peers, by case id, against compiled graphs; with and without asynchronous scheduling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def chunked(engines: Any, tiny_llama: Path, tiny_settings: dict[str, Any]) -> Any:
    """Prompts are computed 32 tokens at a time."""
    buckets = {"neuron_config": {"prefill_buckets": [32], "decode_buckets": [4]}}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "additional_config": buckets}
    return engines(tiny_llama, **tiny_settings | limits)


@pytest.fixture(scope="module")
def next_log_probs(tiny_llama: Path) -> Any:
    """transformers' log-probabilities of the token after each token of a text, ``[len, V]``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def score(text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([text])).logits[0].log_softmax(-1)

    return score


@pytest.mark.supports("penalties and logit edits", model="llama")
def test_t1_allowed_tokens_hold_at_temperature_zero(tiny_both, make_prompts, next_log_probs):
    (prompt,) = make_prompts(1, 20, seed=1)
    assert tiny_both.tokens([prompt], greedy(3, allowed_token_ids=[77])) == [[77, 77, 77]]
    (drawn,) = tiny_both.tokens([prompt], greedy(1, allowed_token_ids=[10, 77, 200]))
    best = max((10, 77, 200), key=lambda token: float(next_log_probs(prompt)[-1, token]))
    assert drawn == [best]


@pytest.mark.supports("penalties and logit edits", model="llama")
def test_t1_banned_word_is_absent_at_temperature_zero(tiny_both, make_prompts, next_log_probs):
    tokenizer = tiny_both.llm.get_tokenizer()
    for prompt in make_prompts(50, 20, seed=2):
        ranked = next_log_probs(prompt)[-1].argsort(descending=True).tolist()
        word = tokenizer.decode(ranked[:1])
        if word.strip() and tokenizer.encode(word, add_special_tokens=False) == ranked[:1]:
            break
    else:
        pytest.fail("no prompt's likeliest token is a word of its own")
    assert tiny_both.tokens([prompt], greedy(1)) == [ranked[:1]]
    assert tiny_both.tokens([prompt], greedy(1, bad_words=[word])) == [ranked[1:2]]
    assert ranked[0] not in tiny_both.tokens([prompt], greedy(8, bad_words=[word]))[0]


@pytest.mark.supports("logprobs", model="llama")
def test_t2_logprobs_reach_the_request_that_asked_and_no_other(tiny_both, make_prompts, next_log_probs):
    prompts = make_prompts(2, 30, seed=3)
    asked, other = tiny_both.run(prompts, [greedy(5, logprobs=2), greedy(5)])
    assert other.outputs[0].logprobs is None
    drawn = list(asked.outputs[0].token_ids)
    expected = next_log_probs(prompts[0] + drawn)[len(prompts[0]) - 1 : -1]
    assert len(asked.outputs[0].logprobs) == 5
    for place, entries in enumerate(asked.outputs[0].logprobs):
        best = expected[place].topk(2)
        assert drawn[place] == int(best.indices[0]) and set(entries) == set(best.indices.tolist())
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
            assert entry.rank == best.indices.tolist().index(token) + 1


@pytest.mark.supports("prompt logprobs", model="llama")
def test_t2_prompt_logprobs_of_a_prompt_in_chunks(chunked, make_prompts, next_log_probs):
    prompt = make_prompts(1, 1, seed=4)[0] * 40 + make_prompts(1, 60, seed=4)[0]
    (output,) = chunked.run([prompt], greedy(1, prompt_logprobs=3))
    expected = next_log_probs(prompt)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
    for place, entries in enumerate(output.prompt_logprobs[1:]):
        assert entries[prompt[place + 1]].logprob == pytest.approx(
            float(expected[place, prompt[place + 1]]), abs=1e-4
        )


def test_t3_a_budget_below_the_length_without_chunking_is_refused(tiny_llama, engine_environment):
    from vllm import LLM

    limits = {"max_num_batched_tokens": 64, "max_model_len": 128, "max_num_seqs": 4}
    with pytest.raises(Exception, match=r"max.num.batched.tokens.*64"):
        LLM(str(tiny_llama), **limits, enable_chunked_prefill=False)


@pytest.mark.supports("chunked prefill", model="llama")
def test_t3_a_prompt_above_the_budget_is_computed_in_chunks(chunked, tiny_llama, continuations):
    prompts = [[5 + i % 200 for i in range(length)] for length in (31, 32, 33, 64, 65, 240)]
    assert chunked.tokens(prompts, greedy(8)) == continuations(tiny_llama, prompts, 8)


@pytest.mark.supports("abort", model="llama")
def test_t6_abort_inside_a_prompt_frees_its_blocks(chunked, tiny_llama, make_prompts, continuations):
    free = chunked.free_blocks
    victim = chunked.add([5 + i % 200 for i in range(200)], greedy(4))
    for _ in range(2):
        chunked.step()
    (request,) = chunked.scheduler.running
    assert request.num_computed_tokens == 64 and chunked.free_blocks < free
    chunked.engine.abort_request([victim])
    chunked.check_idle()
    assert chunked.free_blocks == free
    prompts = make_prompts(1, 40, seed=6)
    assert chunked.tokens(prompts, greedy(8)) == continuations(tiny_llama, prompts, 8)


def test_t8_a_model_of_131072_positions_starts_without_a_length(
    engines, tmp_path_factory, tiny_llama, tiny_settings
):
    import json
    import shutil

    folder = shutil.copytree(tiny_llama, tmp_path_factory.mktemp("long") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    settings = {name: value for name, value in tiny_settings.items() if name != "max_model_len"}
    buckets = {"neuron_config": {"compiler": "fx", "prefill_buckets": [256], "decode_buckets": [4]}}
    limits = {"max_num_seqs": 4, "num_gpu_blocks_override": 8193, "additional_config": buckets}
    engine = engines(folder, **settings | limits)
    assert engine.core.vllm_config.model_config.max_model_len == 131072
    contexts = [131072 >> halvings for halvings in range(9)]  # down to 512
    decode = [f"decode_b4_c{length}" for length in contexts]
    assert [bucket.name for bucket in engine.runner.plan.all()] == ["prefill_s256", "logits_s64", *decode]
    assert len(engine.tokens([[7] * 300], greedy(4))[0]) == 4


def test_t9_a_prefix_hit_that_only_just_fits(tiny_both, tiny_llama, continuations):
    first = [5 + i % 230 for i in range(200)]
    second = first[:32] + [9 + i % 100 for i in range(168)]
    expected = continuations(tiny_llama, [first, second], 56)
    ids = [tiny_both.add(first, greedy(200))]  # asks for more than the 56 that fit
    finished: dict[str, Any] = {}
    for _ in range(10):
        tiny_both.step()
    ids.append(tiny_both.add(second, greedy(56)))
    while tiny_both.engine.has_unfinished_requests():
        finished |= {name: output for name, output in tiny_both.step().items() if output.finished}
    outputs = [finished[name] for name in ids]
    assert outputs[1].num_cached_tokens == 32
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert outputs[0].outputs[0].finish_reason == "length"


@pytest.mark.supports("continuous batching", model="llama")
def test_t10_33_concurrent_requests_get_33_right_answers(tiny_both, tiny_llama, make_prompts, continuations):
    prompts = make_prompts(33, 12, seed=10)
    ids = [tiny_both.add(prompt, greedy(16)) for prompt in prompts]
    widest, finished = 0, {}
    while tiny_both.engine.has_unfinished_requests():
        finished |= {name: output for name, output in tiny_both.step().items() if output.finished}
        widest = max(widest, len(tiny_both.scheduler.running))
    assert widest == 33
    assert [list(finished[n].outputs[0].token_ids) for n in ids] == continuations(tiny_llama, prompts, 16)


@pytest.mark.supports("temperature, top-k, top-p, min-p", model="llama")
def test_t13_top_k_above_the_vocabulary_beside_a_greedy_row(
    tiny_both, tiny_llama, make_prompts, continuations
):
    (prompt,) = make_prompts(1, 30, seed=13)

    def drawn(top_k: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, top_k=top_k, seed=3, max_tokens=12, ignore_eos=True)

    params = [greedy(12), drawn(5), drawn(257), drawn(0), drawn(1)]
    plain, five, above, off, one = tiny_both.tokens([prompt] * 5, params)
    assert [plain] == continuations(tiny_llama, [prompt], 12)
    assert above == off != five and one == plain


def test_t14_fewer_compiled_rows_than_sequences_is_refused_with_both_numbers(tiny_llama, engine_environment):
    from vllm import LLM

    buckets = {"neuron_config": {"decode_buckets": [1, 2]}}
    with pytest.raises(Exception, match=r"decode_buckets=\[1, 2\].* 4 \(max_num_seqs\)"):
        LLM(str(tiny_llama), max_model_len=128, max_num_seqs=4, additional_config=buckets)


def test_a3_steps_without_tokens_change_nothing(tiny_both, tiny_llama, make_prompts, continuations):
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    prompts = make_prompts(3, 40, seed=14)
    expected = continuations(tiny_llama, prompts, 10)
    for prompt, wanted in zip(prompts, expected, strict=True):
        assert tiny_both.tokens([prompt], greedy(10)) == [wanted]
        for _ in range(3):
            output = tiny_both.core.model_executor.execute_model(SchedulerOutput.make_empty())
            assert output is not None and output.req_ids == EMPTY_MODEL_RUNNER_OUTPUT.req_ids == []
            assert tiny_both.step() == {}


def test_x1_the_same_prompt_three_times(tiny_both, tiny_llama, continuations):
    prompt = [5 + i for i in range(40)]
    outputs = [tiny_both.run([prompt], greedy(12))[0] for _ in range(3)]
    assert [list(output.outputs[0].token_ids) for output in outputs] == continuations(
        tiny_llama, [prompt], 12
    ) * 3
    assert [output.num_cached_tokens // 16 for output in outputs] == [0, 2, 2]


@pytest.mark.supports("several samples of one request", model="llama")
def test_n_samples_of_one_request_are_its_own_and_repeatable(tiny_both, make_prompts):
    (prompt,) = make_prompts(1, 40, seed=15)
    params = SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=10, ignore_eos=True)
    once, again = (
        [list(sample.token_ids) for sample in tiny_both.run([prompt], params)[0].outputs] for _ in range(2)
    )
    assert once == again and len({tuple(sample) for sample in once}) == 4


def test_every_running_request_preempted_at_once_goes_on_with_the_same_text(
    tiny_both, tiny_llama, make_prompts, continuations
):
    # vLLM drops what was in flight when it forces this, so the worker may know a token the scheduler does not.
    prompts = make_prompts(6, 60, seed=16)
    ids = [tiny_both.add(prompt, greedy(20)) for prompt in prompts]
    for _ in range(8):
        tiny_both.step()
    assert tiny_both.engine.reset_prefix_cache(reset_running_requests=True)
    finished: dict[str, Any] = {}
    while tiny_both.engine.has_unfinished_requests():
        finished |= tiny_both.step()
    assert [list(finished[name].outputs[0].token_ids) for name in ids] == continuations(
        tiny_llama, prompts, 20
    )
