# SPDX-License-Identifier: Apache-2.0
"""Changes of how vLLM's front end takes requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "check_extra_args",
    "check_payload_layout",
    "check_prompts",
    "check_request_forms",
    "check_what_is_dropped",
]


def check_prompts() -> None:
    """Check tokens and embeddings of a prompt where vLLM renders and takes them."""
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.prompt_admission import admit_embeds, check_tokens

    render, validate = BaseRenderer._process_embeds, InputProcessor._validate_model_input
    if hasattr(render, "__wrapped__"):
        return

    # Where a stream can still be answered with a status,
    @functools.wraps(render)
    def _process_embeds(self: Any, prompt: Any) -> Any:
        rendered = render(self, prompt)
        rendered["prompt_embeds"] = admit_embeds(rendered, self.model_config)
        return rendered

    # and where prompts that were rendered elsewhere come in.
    @functools.wraps(validate)
    def _validate_model_input(self: Any, prompt_input: Any, prompt_type: Any) -> None:
        validate(self, prompt_input, prompt_type)
        if prompt_input["type"] == "embeds":
            prompt_input["prompt_embeds"] = admit_embeds(prompt_input, self.model_config)
        else:
            check_tokens(prompt_input["prompt_token_ids"], self.model_config)

    BaseRenderer._process_embeds = _process_embeds
    InputProcessor._validate_model_input = _validate_model_input


def check_extra_args() -> None:
    """Refuse ``extra_args`` where no logits processor reads them."""
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.admission import refuse_unread
    from vllm_neuron.runner.processors import has_custom_processors

    original = InputProcessor._build_logits_processors_params_validator
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _build_logits_processors_params_validator(self: Any) -> Callable[[Any], None]:
        validate: Callable[[Any], None] = original(self)
        if has_custom_processors(self.model_config):
            return validate
        return refuse_unread  # the other has no processor to ask

    InputProcessor._build_logits_processors_params_validator = _build_logits_processors_params_validator


def check_payload_layout() -> None:
    """Refuse payloads of embeddings that no conversion makes dense."""
    from vllm.renderers import embed_utils

    from vllm_neuron.prompt_admission import check_layout

    original = embed_utils.safe_to_dense
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def safe_to_dense(tensor: Any, *, parameter: str) -> torch.Tensor:
        check_layout(tensor, parameter)
        dense: torch.Tensor = original(tensor, parameter=parameter)
        return dense

    embed_utils.safe_to_dense = safe_to_dense


def check_request_forms() -> None:
    """Refuse what vLLM's validators cannot read and its input processor cannot send."""
    from pydantic import TypeAdapter
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.admission import check_utf8, settle
    from vllm_neuron.request_forms import MISREAD, as_validation_error, check_priority

    validate, process = TypeAdapter.validate_python, InputProcessor.process_inputs
    if hasattr(validate, "__wrapped__"):
        return

    @functools.wraps(validate)
    def validate_python(self: Any, value: Any, /, **settings: Any) -> Any:
        try:
            return validate(self, value, **settings)
        except MISREAD as error:
            refusal = as_validation_error(error, value)
            if refusal is None:
                raise
            raise refusal from error

    @functools.wraps(process)
    def process_inputs(
        self: Any,
        request_id: str,
        *args: Any,
        priority: int = 0,
        session_id: str | None = None,
        **kwargs: Any,
    ) -> Any:
        check_utf8(request_id, "request_id")
        check_utf8(session_id, "session_id")
        # Offline, a priority without that policy is documented to do nothing; only servers' AsyncLLM chooses a rank.
        policy = self.vllm_config.scheduler_config.policy if "data_parallel_rank" in kwargs else "priority"
        check_priority(priority, policy)
        request = process(self, request_id, *args, priority=priority, session_id=session_id, **kwargs)
        if request.sampling_params is not None:
            settle(request.sampling_params, self.vllm_config)
        return request

    setattr(TypeAdapter, "validate_python", validate_python)  # noqa: B010, mypy knows its overloads
    InputProcessor.process_inputs = process_inputs


def check_what_is_dropped() -> None:
    """Refuse what vLLM's requests clamp, and what beam search drops."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.beam_admission import check_beam_search, check_watermark
    from vllm_neuron.request_forms import check_bias

    from_optional, resolve = SamplingParams.from_optional, InputProcessor.resolve_watermarking
    if hasattr(from_optional, "__wrapped__"):
        return

    @functools.wraps(from_optional)
    def checked(*args: Any, **settings: Any) -> Any:
        check_bias(settings.get("logit_bias"))
        return from_optional(*args, **settings)

    @functools.wraps(resolve)
    def resolve_watermarking(self: Any, params: Any) -> Any:
        check_watermark(params)
        return resolve(self, params)

    InputProcessor.resolve_watermarking = resolve_watermarking
    setattr(SamplingParams, "from_optional", staticmethod(checked))  # noqa: B010, mypy knows its signature
    for request in (ChatCompletionRequest, CompletionRequest):
        _check_beams_of(request, check_beam_search)


def _check_beams_of(request: Any, check: Callable[[Any], None]) -> None:
    original = request.to_beam_search_params

    @functools.wraps(original)
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return original(self, *args, **kwargs)

    request.to_beam_search_params = to_beam_search_params
