# SPDX-License-Identifier: Apache-2.0
"""Every sampling parameter vLLM has is either honoured or refused by name."""

from __future__ import annotations

import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from vllm_neuron.admission import (
    HONOURED,
    LARGEST_BIAS,
    PENALTIES,
    POOLING_HONOURED,
    POOLING_REFUSED,
    REFUSED,
    refuse_unread,
)


def test_every_field_of_vllm_is_in_exactly_one_table():
    fields = set(SamplingParams.__struct_fields__)
    # extra_args is judged key by key.
    assert fields - {"extra_args"} == HONOURED.keys() | REFUSED.keys()
    assert not HONOURED.keys() & REFUSED.keys()


def test_a_plain_request_passes():
    current_platform.validate_request({}, SamplingParams())


ASKED = {
    "thinking_token_budget": 0,
    "watermarking": True,
    "logprob_token_ids": [1, 2],
    "prompt_logprob_token_ids": [[1]],
    "prompt_logprob_start": 0,
    "trace_decode_token_ids": [1],
    "routed_experts_prompt_start": 1,
}


def test_every_refused_field_has_a_value_here():
    assert ASKED.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", ASKED)
def test_a_refused_field_is_named_in_a_client_error(name):
    # Set on the object: vLLM's constructor has rules of its own about which of these go together.
    params = SamplingParams()
    setattr(params, name, ASKED[name])
    with pytest.raises(VLLMValidationError) as caught:
        current_platform.validate_request({}, params)
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1},
        # Above the vocabulary: vLLM's meaning is "all tokens", so it is clamped in the graph, not refused.
        {"top_k": 10**6},
        {"n": 3, "stop": ["x"], "stop_token_ids": [5], "include_stop_str_in_output": True},
        {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1},
        {"logit_bias": {5: 2.0}, "allowed_token_ids": [5, 6], "bad_words": ["x"], "min_tokens": 2},
        {"logprobs": 2, "prompt_logprobs": 1, "flat_logprobs": True},
        {"prompt_logprobs": 1, "skip_reading_prefix_cache": True},
        {"max_tokens": 3, "ignore_eos": True, "skip_special_tokens": False, "detokenize": False},
        {"watermarking": False},
        {"extra_args": {}},
        {"extra_args": {"kv_transfer_params": None}},
    ],
    ids=str,
)
def test_honoured_parameters_pass(params):
    current_platform.validate_request({}, SamplingParams(**params))


@pytest.mark.parametrize("name", ["stream_interval", "top_k", "max_tokens", "logprobs", "stop_token_ids"])
def test_a_number_that_cannot_be_sent_to_the_engine_is_refused_by_name(name):
    for number in (2**62, 2**63):
        params = SamplingParams(**{name: [7, number] if name == "stop_token_ids" else number})
        if number == 2**62:
            current_platform.validate_request({}, params)
            continue
        with pytest.raises(VLLMValidationError, match="64 bits") as caught:
            current_platform.validate_request({}, params)
        assert (caught.value.parameter, caught.value.value) == (name, number)


HALF = "x\ud800"
REPETITION = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("stop[1]", {"stop": ["é", HALF]}),
        ("bad_words[0]", {"bad_words": [HALF]}),
        (
            "repetition_detection.max_pattern_size",
            {"repetition_detection": RepetitionDetectionParams(**REPETITION | {"max_pattern_size": 2**64})},
        ),
        (
            "repetition_detection.min_count",
            {"repetition_detection": RepetitionDetectionParams(**REPETITION | {"min_count": 10**30})},
        ),
        (
            "structured_outputs.json.properties.x.maximum",
            {"structured_outputs": StructuredOutputsParams(json={"properties": {"x": {"maximum": 2**64}}})},
        ),
        ("structured_outputs.choice[0]", {"structured_outputs": StructuredOutputsParams(choice=[HALF])}),
        ("extra_args", {"extra_args": {HALF: 1}}),
        (r"extra_args.\U0001f600[0][1]", {"extra_args": {"😀": [(1, HALF)]}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_message_to_the_engine_can_hold_is_refused_by_its_path(path, params):
    with pytest.raises(VLLMValidationError, match=r"64 bits|surrogate") as caught:
        current_platform.validate_request({}, SamplingParams(**params))
    assert caught.value.parameter == path
    str(caught.value).encode()


def test_what_a_message_can_hold_passes():
    params = SamplingParams(
        stop=["😀"],
        repetition_detection=RepetitionDetectionParams(**REPETITION | {"min_count": 2**63}),
        extra_args={"x": object(), "y": {1: 2**64 - 1}},
    )
    current_platform.validate_request({}, params)


@pytest.mark.parametrize("penalty", [1e-45, 1e-40, 1e-38, 1e-11, 1e11, 1e38])
def test_a_penalty_that_leaves_no_finite_logit_is_refused(penalty):
    with pytest.raises(VLLMValidationError, match="must be from 1e-10 to 1e") as caught:
        current_platform.validate_request({}, SamplingParams(repetition_penalty=penalty))
    assert (caught.value.parameter, caught.value.value) == ("repetition_penalty", penalty)


@pytest.mark.parametrize("bias", [float("inf"), float("-inf"), float("nan"), 1e39, -1e21])
def test_a_bias_that_leaves_no_finite_logit_is_refused(bias):
    with pytest.raises(VLLMValidationError, match="use bad_words or allowed_token_ids") as caught:
        current_platform.validate_request({}, SamplingParams(logit_bias={7: 1.0, 9: bias}))
    assert caught.value.parameter == "logit_bias[9]"


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("bias", [LARGEST_BIAS, -LARGEST_BIAS])
def test_the_largest_edits_leave_logits_finite(bias, penalty):
    current_platform.validate_request({}, SamplingParams(logit_bias={7: bias}, repetition_penalty=penalty))
    logits = torch.tensor([[0.5, 1e6, -1e6]]) + torch.tensor([0.0, bias, bias])
    logits = torch.where(logits > 0, logits / penalty, logits * penalty) / 0.01  # vLLM's least temperature
    assert logits.isfinite().all() and (logits - logits.max()).isfinite().all()


def test_extra_arguments_without_a_reader_are_refused():
    with pytest.raises(VLLMValidationError) as caught:
        refuse_unread(SamplingParams(extra_args={"some_extension": 1}))
    assert caught.value.parameter == "extra_args.some_extension"
    refuse_unread(SamplingParams(extra_args={"some_extension": None, "kv_cache_report_mode": "full"}))


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_extra_arguments_of_what_is_not_supported_are_refused(name):
    with pytest.raises(VLLMValidationError) as caught:
        current_platform.validate_request({}, SamplingParams(extra_args={name: {"a": 1}}))
    assert caught.value.parameter == f"extra_args.{name}"


def test_prompt_logprobs_cannot_be_read_from_the_prefix_cache():
    with pytest.raises(VLLMValidationError, match="use true or leave it out") as caught:
        current_platform.validate_request(
            {}, SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)
        )
    assert caught.value.parameter == "skip_reading_prefix_cache"
    current_platform.validate_request({}, SamplingParams(skip_reading_prefix_cache=False))


def test_every_field_of_a_pooling_request_is_in_exactly_one_table():
    assert set(PoolingParams.__struct_fields__) == POOLING_HONOURED.keys() | POOLING_REFUSED.keys()
    assert not POOLING_HONOURED.keys() & POOLING_REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "token_embed"),
        ("task", "plugin"),
        ("step_tag_id", 1),
        ("returned_token_ids", [1]),
        ("late_interaction_params", object()),
        ("extra_kwargs", {"a": 1}),
    ],
)
def test_a_pooling_request_for_more_than_a_text_as_a_whole_is_refused(name, value):
    params = PoolingParams(task="embed")
    current_platform.validate_request({}, params)
    setattr(params, name, value)
    with pytest.raises(VLLMValidationError) as caught:
        current_platform.validate_request({}, params)
    assert caught.value.parameter == name


@pytest.mark.parametrize("start", [-1, "2", 1.5, True])
def test_the_place_of_a_second_text_must_be_one(start):
    for task, value in (("classify", start), ("embed", 2)):
        params = PoolingParams(task=task, extra_kwargs={"compressed_token_type_ids": value})
        with pytest.raises(VLLMValidationError, match="the place of a second text") as caught:
            current_platform.validate_request({}, params)
        assert caught.value.parameter == "extra_kwargs.compressed_token_type_ids"


def test_parameters_of_a_pair_pass():
    for extra in ({"compressed_token_type_ids": 0}, {"max_tokens_per_doc": 4}, {}):
        current_platform.validate_request({}, PoolingParams(task="classify", extra_kwargs=extra))


def test_parameters_of_an_embedding_pass():
    for params in ({"dimensions": 8}, {"use_activation": False}, {"skip_reading_prefix_cache": True}):
        current_platform.validate_request({}, PoolingParams(task="embed", **params))
