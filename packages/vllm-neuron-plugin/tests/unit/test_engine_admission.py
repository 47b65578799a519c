# SPDX-License-Identifier: Apache-2.0
"""What an engine's own settings, vocabulary and tokenizer refuse (HTTP 400), through vLLM's ``InputProcessor``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_neuron.bad_words import dead_end

VOCAB = 256
TOKENS = {"type": "token", "prompt_token_ids": [5, 6]}
Process = Callable[..., Any]


@pytest.fixture(scope="module")
def make_process(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Process]:
    """``make_process(**arguments)(prompt, params, ...)``: the engine's request; the tokenizer has a token too many."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("padded") / "model"
    shutil.copytree(tiny_llama, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[NEW]"]})
    tokenizer.save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids("[NEW]") == VOCAB

    def make(**arguments: Any) -> Process:
        config = EngineArgs(
            model=str(folder), dtype="float32", max_model_len=128, max_num_seqs=4, **arguments
        ).create_engine_config()
        processor = InputProcessor(config)

        def process(
            prompt: Any = TOKENS, name: str = "a", *, more: dict[str, Any] | None = None, **params: Any
        ):
            return processor.process_inputs(
                name, prompt, SamplingParams(**params), supported_tasks=("generate",), **(more or {})
            )

        return process

    return make


@pytest.fixture(scope="module")
def process(make_process: Callable[..., Process]) -> Process:
    """An engine as it is by default."""
    return make_process()


def token_prompt(*token_ids: int) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": list(token_ids)}


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.2}], ids=str)
def test_a_token_that_only_the_tokenizer_has_is_refused(process, params):
    assert process("abcd", **params).prompt_token_ids
    for prompt in ("ab[NEW]cd", token_prompt(5, 6, VOCAB)):
        with pytest.raises(
            VLLMValidationError, match=r"\[2\] is 256; tokens of this model are 0 to 255"
        ) as caught:
            process(prompt, **params)
        assert (caught.value.parameter, caught.value.value) == ("prompt_token_ids", VOCAB)


def test_without_a_tokenizer_tokens_are_held_against_the_vocabulary(make_process):
    process = make_process(skip_tokenizer_init=True)
    process(token_prompt(0, VOCAB - 1), detokenize=False)
    for wrong in (-1, VOCAB, 10**6, 2**31):
        with pytest.raises(VLLMValidationError, match=f"is {wrong}; tokens of this model"):
            process(token_prompt(5, wrong), detokenize=False)


def test_bad_words_that_the_model_cannot_draw_are_left_out(process):
    def words(*bad_words: str) -> list[list[int]]:
        return process(bad_words=list(bad_words)).sampling_params.bad_words_token_ids

    assert words("[NEW]", "b[NEW]c", "d") == words("d")
    assert words("[NEW]") == []


def test_tokens_of_which_none_is_left_are_refused(process):
    ((token,),) = (
        word for word in process(bad_words=["d"]).sampling_params.bad_words_token_ids if len(word) == 1
    )
    process(bad_words=["d"], allowed_token_ids=[token, 7])
    process(bad_words=["de"], allowed_token_ids=[token])
    process(bad_words=["ddd"], allowed_token_ids=[token], max_tokens=2)
    for word, said in (
        ("d", "every token of allowed"),
        ("ddd", rf"after tokens \[{token}, {token}\], every token"),
    ):
        with pytest.raises(VLLMValidationError, match=said) as caught:
            process(bad_words=[word], allowed_token_ids=[token, token], max_tokens=3)
        assert (caught.value.parameter, caught.value.value) == ("bad_words", [word])


@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=9),
    allowed=st.sets(st.integers(0, 3), min_size=1, max_size=3),
    stops=st.sets(st.integers(0, 3), max_size=1),
    steps=st.integers(1, 5),
)
@example(words=[[1, 1]], allowed={1}, stops={1}, steps=3)
@example(words=[[1, 1]], allowed={1}, stops=set(), steps=3)
@settings(max_examples=150, deadline=None)
def test_a_dead_end_is_found_as_by_trying_all_that_can_be_drawn(words, allowed, stops, steps):
    def ways(drawn: tuple[int, ...]) -> list[tuple[int, ...]]:
        longer = [(*drawn, token) for token in sorted(allowed)]
        return [way for way in longer if not any(list(way[-len(word) :]) == word for word in words)]

    layer, stuck = [()], None
    for _ in range(steps):
        if stuck is None:
            stuck = next((drawn for drawn in layer if not ways(drawn)), None)
        layer = [way for drawn in layer for way in ways(drawn) if way[-1] not in stops]
    found = dead_end(words, allowed, stops, steps)
    assert (found is None) == (stuck is None)
    if found is not None:
        assert len(found) == len(stuck) and not ways(found)


@pytest.mark.parametrize("field", ["request_id", "session_id"])
def test_half_of_a_surrogate_pair_is_no_name(process, field):
    process(name="é😀", more={"session_id": "é😀"})
    half = {"name": "x\ud800"} if field == "request_id" else {"more": {"session_id": "x\ud800"}}
    with pytest.raises(VLLMValidationError, match="surrogate") as caught:
        process(**half)
    assert caught.value.parameter == field
    str(caught.value).encode()


@pytest.mark.parametrize("priority", [-1, 7])
def test_a_priority_needs_a_scheduler_that_reads_it(process, make_process, priority):
    of_a_server = {"data_parallel_rank": None}
    process(more={"priority": 0, **of_a_server})
    process(more={"priority": priority})  # as vLLM documents its LLM
    by_priority = make_process(scheduling_policy="priority")
    assert by_priority(more={"priority": priority, **of_a_server}).priority == priority
    with pytest.raises(VLLMValidationError, match="start with --scheduling-policy priority") as caught:
        process(more={"priority": priority, **of_a_server})
    assert (caught.value.parameter, caught.value.value) == ("priority", priority)


@pytest.mark.parametrize(
    ("name", "value", "config"),
    [
        ("whitespace_pattern", " ?", None),
        ("disable_any_whitespace", True, {"backend": "xgrammar", "disable_any_whitespace": True}),
        (
            "disable_additional_properties",
            True,
            {"backend": "guidance", "disable_additional_properties": True},
        ),
    ],
)
def test_an_option_of_grammars_that_nobody_reads_is_refused(process, make_process, name, value, config):
    asked = StructuredOutputsParams(json={"type": "object"}, **{name: value})
    with pytest.raises(VLLMValidationError, match=r"leave it out|additionalProperties") as caught:
        process(structured_outputs=asked)
    assert caught.value.parameter == f"structured_outputs.{name}"
    if config is not None:
        asked = StructuredOutputsParams(json={"type": "object"}, **{name: value})
        make_process(structured_outputs_config=config)(structured_outputs=asked)


def test_more_log_probabilities_than_tokens_are_refused(make_process):
    for limit in (-1, VOCAB):
        process = make_process(max_logprobs=limit)
        process(logprobs=VOCAB, prompt_logprobs=-1)
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(VLLMValidationError, match="256") as caught:
                process(**{name: VOCAB + 1})
            assert caught.value.parameter == name
    # vLLM's own limit, of which nobody has said a word.
    process = make_process(hf_overrides={"vocab_size": 12})
    process(logprobs=12)
    with pytest.raises(
        VLLMValidationError, match="the model has 12 tokens; use at most 12, or -1 for all"
    ) as caught:
        process(logprobs=13)
    assert caught.value.parameter == "logprobs"
