# SPDX-License-Identifier: Apache-2.0
"""Beam search reads some fields of a request: the others are refused by name, and none is forgotten."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from pydantic import TypeAdapter
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_neuron.beam_admission import UNREAD
from vllm_neuron.patches import apply_patches

KINDS = (CompletionRequest, ChatCompletionRequest)
ELSEWHERE = {
    "_DEFAULT_SAMPLING_PARAMS": "no field",
    "extract_structured_outputs": "response_format and structured_outputs",
    "logprobs": "checked beside the table",
    "top_logprobs": "checked beside the table",
    "stream": "vLLM refuses it",
    "stream_interval": "of streams",
    "echo": "of the answer",
    "max_tokens": "given as an argument",
}


@pytest.fixture(autouse=True)
def patched() -> None:
    apply_patches()


def beams(kind: type, **fields: Any) -> Any:
    """vLLM's parameters of beam search for a request of ``kind`` that has come over HTTP."""
    asked = {"prompt": "a"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "a"}]}
    request = TypeAdapter(kind).validate_python({**asked, "use_beam_search": True, "n": 2, **fields})
    return request.to_beam_search_params(8, {})


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_sampling_is_read_or_refused(kind):
    def read(method: Any) -> set[str]:
        return set(re.findall(r"\bself\.(\w+)", inspect.getsource(inspect.unwrap(method))))

    dropped = read(kind.to_sampling_params) - read(kind.to_beam_search_params)
    assert {"stop", "bad_words", "seed"} <= dropped
    in_a_loop = kind.__private_attributes__["_DEFAULT_SAMPLING_PARAMS"].default.keys() - {"temperature"}
    assert dropped | in_a_loop <= UNREAD.keys() | ELSEWHERE.keys()


ASKED = {
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.2,
    "min_p": 0.1,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 0,
    "stop": "x",
    "stop_token_ids": [5],
    "bad_words": ["x"],
    "logit_bias": {"5": 1},
    "min_tokens": 2,
    "allowed_token_ids": [5],
    "prompt_logprobs": 0,
    "structured_outputs": {"choice": ["x"]},
    "response_format": {"type": "json_object"},
    "kv_transfer_params": {"x": 1},
    "ec_transfer_params": {"x": 1},
    "vllm_xargs": {"x": 1},
    "thinking_token_budget": 0,
    "repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2},
    "routed_experts_prompt_start": 1,
    "spaces_between_special_tokens": False,
    "priority": 1,
}


def test_every_field_has_a_value_here():
    # vLLM refuses the first itself, and the second is of chats.
    assert ASKED.keys() == UNREAD.keys() - {"logprob_token_ids", "tool_choice"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ASKED)
def test_what_beam_search_drops_is_refused_by_name(kind, name):
    with pytest.raises(VLLMValidationError, match="leave out") as caught:
        beams(kind, **{name: ASKED[name]})
    assert caught.value.parameter == name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "length_penalty": 2, "ignore_eos": True, "skip_special_tokens": False},
        {"repetition_penalty": 1.0, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "stop": []},
        {"response_format": {"type": "text"}, "logit_bias": {}, "priority": 0, "user": "x"},
    ],
    ids=str,
)
def test_what_asks_for_nothing_more_passes(kind, fields):
    assert beams(kind, **fields).beam_width == 2


def test_a_tool_that_must_be_called_is_refused():
    tool = {"type": "function", "function": {"name": "x", "parameters": {}}}
    beams(ChatCompletionRequest, tools=[tool], tool_choice="auto")
    with pytest.raises(VLLMValidationError) as caught:
        beams(ChatCompletionRequest, tools=[tool], tool_choice="required")
    assert caught.value.parameter == "tool_choice"


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [(CompletionRequest, "logprobs", {}), (ChatCompletionRequest, "top_logprobs", {"logprobs": True})],
)
def test_no_more_log_probabilities_than_candidates_are_reported(kind, name, fields):
    beams(kind, **fields, **{name: 4})
    with pytest.raises(VLLMValidationError, match="use 4") as caught:
        beams(kind, **fields, **{name: 5})
    assert (caught.value.parameter, caught.value.value) == (name, 5)


def test_a_watermark_of_beams_is_refused():
    nobody = object()  # vLLM would ask its engine whether it has one
    with pytest.raises(VLLMValidationError, match="leave it out or use false") as caught:
        InputProcessor.resolve_watermarking(
            nobody, BeamSearchParams(beam_width=2, max_tokens=1, watermarking=True)
        )
    assert caught.value.parameter == "watermarking"
    with pytest.raises(AttributeError, match="vllm_config"):
        InputProcessor.resolve_watermarking(nobody, BeamSearchParams(beam_width=2, max_tokens=1))
