# SPDX-License-Identifier: Apache-2.0
"""Changes of how vLLM's front end takes requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_neuron.patches.wrapping import wrapping

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

    # Where a stream can still be answered with a status,
    @wrapping(BaseRenderer, "_process_embeds")
    def rendered(original: Callable[..., Any], self: Any, prompt: Any) -> Any:
        rendered = original(self, prompt)
        rendered["prompt_embeds"] = admit_embeds(rendered, self.model_config)
        return rendered

    # and where prompts that were rendered elsewhere come in.
    @wrapping(InputProcessor, "_validate_model_input")
    def validated(original: Callable[..., Any], self: Any, prompt_input: Any, prompt_type: Any) -> None:
        original(self, prompt_input, prompt_type)
        if prompt_input["type"] == "embeds":
            prompt_input["prompt_embeds"] = admit_embeds(prompt_input, self.model_config)
        else:
            check_tokens(prompt_input["prompt_token_ids"], self.model_config)


def check_extra_args() -> None:
    """Refuse ``extra_args`` where no logits processor reads them."""
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.admission import refuse_unread
    from vllm_neuron.runner.processors import has_custom_processors

    @wrapping(InputProcessor, "_build_logits_processors_params_validator")
    def validator(original: Callable[..., Any], self: Any) -> Any:
        validate = original(self)
        # The other has no processor to ask.
        return validate if has_custom_processors(self.model_config) else refuse_unread


def check_payload_layout() -> None:
    """Refuse payloads of embeddings that no conversion makes dense."""
    from vllm.renderers import embed_utils

    from vllm_neuron.prompt_admission import check_layout

    @wrapping(embed_utils, "safe_to_dense")
    def dense(original: Callable[..., Any], tensor: Any, *, parameter: str) -> Any:
        check_layout(tensor, parameter)
        return original(tensor, parameter=parameter)


def check_request_forms() -> None:
    """Refuse what vLLM's validators cannot read and its input processor cannot send."""
    from pydantic import TypeAdapter
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.admission import check_utf8, settle
    from vllm_neuron.request_forms import MISREAD, as_validation_error, check_priority

    @wrapping(TypeAdapter, "validate_python")
    def read(original: Callable[..., Any], self: Any, value: Any, /, **settings: Any) -> Any:
        try:
            return original(self, value, **settings)
        except MISREAD as error:
            refusal = as_validation_error(error, value)
            if refusal is None:
                raise
            raise refusal from error

    @wrapping(InputProcessor, "process_inputs")
    def processed(
        original: Callable[..., Any],
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
        request = original(self, request_id, *args, priority=priority, session_id=session_id, **kwargs)
        if request.sampling_params is not None:
            settle(request.sampling_params, self.vllm_config)
        return request


def check_what_is_dropped() -> None:
    """Refuse what vLLM's requests clamp, and what beam search drops."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.beam_admission import check_beam_search, check_watermark
    from vllm_neuron.request_forms import check_bias

    @wrapping(SamplingParams, "from_optional")
    def made(original: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        check_bias(settings.get("logit_bias"))
        return original(*args, **settings)

    @wrapping(InputProcessor, "resolve_watermarking")
    def resolved(original: Callable[..., Any], self: Any, params: Any) -> Any:
        check_watermark(params)
        return original(self, params)

    for request in (ChatCompletionRequest, CompletionRequest):

        @wrapping(request, "to_beam_search_params")
        def beams(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            check_beam_search(self)
            return original(self, *args, **kwargs)
