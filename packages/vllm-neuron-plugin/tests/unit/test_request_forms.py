# SPDX-License-Identifier: Apache-2.0
"""Every field of every request model of vLLM's servers, given values of every JSON type: taken or refused, no more."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator

import pytest
import vllm.entrypoints
from fastapi import HTTPException
from pydantic import BaseModel, TypeAdapter, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMError, VLLMValidationError

from vllm_neuron.patches import apply_patches

VALUES = (
    *(None, True, 0, -1, 10**30, 0.5, float("nan"), "", "x"),
    *([], [0], ["x"], [[]], [{}], [{"type": 0}], {}, {"x": 1}, {"type": 0}, {"type": []}),
    *({"type": kind} for kind in ("json_schema", "structural_tag", "function", "text")),
)
VALID = {
    "model": "x",
    "prompt": "x",
    "input": "x",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 1,
}
REFUSALS = (ValidationError, VLLMError, HTTPException)
"""What vLLM's handlers answer with a status of 4xx."""


def _below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def _requests() -> list[type[BaseModel]]:
    for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
        if module.name.endswith(".protocol"):
            # vLLM serves Cohere's API where its SDK is installed.
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module.name)
    return [
        one
        for one in set(_below(BaseModel))
        if one.__module__.startswith("vllm.entrypoints.") and one.__name__.endswith("Request")
    ]


def test_a_field_of_any_type_is_taken_or_refused():
    apply_patches()
    requests = _requests()
    assert {"CompletionRequest", "ChatCompletionRequest", "EmbeddingChatRequest"} <= {
        one.__name__ for one in requests
    }
    for request in requests:
        adapter = TypeAdapter(request)
        valid = {name: value for name, value in VALID.items() if name in request.model_fields}
        for field in request.model_fields:
            for value in VALUES:
                try:
                    adapter.validate_python(valid | {field: value})
                except REFUSALS:
                    continue


def test_a_mistake_of_other_code_stays_what_it_is():
    apply_patches()

    class Own(BaseModel):
        def __init__(self, **fields: object) -> None:
            fields["absent"]

    with pytest.raises(KeyError, match="absent"):
        TypeAdapter(Own).validate_python({})


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_a_bias_is_refused_where_vllm_clamps_it(kind):
    apply_patches()

    def ask(bias: object) -> object:
        fields = {name: value for name, value in VALID.items() if name in kind.model_fields}
        request = TypeAdapter(kind).validate_python(fields | {"logit_bias": {"5": 1, "6": bias}})
        return request.to_sampling_params(1, {}).logit_bias

    for bias in (-100, 100):
        assert ask(bias) == {5: 1, 6: bias}
    for bias in (-100.5, 1000, float("nan"), float("inf"), 10**30):
        with pytest.raises(VLLMValidationError, match="from -100 to 100") as caught:
            ask(bias)
        assert caught.value.parameter == "logit_bias['6']"
