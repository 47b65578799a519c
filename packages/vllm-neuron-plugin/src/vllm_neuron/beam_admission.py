# SPDX-License-Identifier: Apache-2.0
"""Beam search, which vLLM's front end makes of requests for one token each: what it drops is refused (HTTP 400)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams, SamplingParams

from vllm_neuron.admission import REFUSED

__all__ = ["UNREAD", "check_beam_search", "check_watermark"]


def _given(value: object) -> bool:
    return value is not None


UNREAD: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), bool),
    **dict.fromkeys(("stop", "stop_token_ids", "bad_words", "logit_bias", "priority"), bool),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs"), bool),
    **dict.fromkeys(("repetition_detection", "routed_experts_prompt_start"), bool),
    **dict.fromkeys(("seed", "allowed_token_ids", "prompt_logprobs", "logprob_token_ids"), _given),
    "thinking_token_budget": _given,
    "repetition_penalty": lambda penalty: penalty not in (None, 1),
    "top_p": lambda share: share not in (None, 1),
    "top_k": lambda count: count not in (None, 0, -1),
    "spaces_between_special_tokens": lambda apart: not apart,
    # A tool that must be called becomes a grammar.
    "tool_choice": lambda choice: choice not in (None, "none", "auto"),
    "response_format": lambda form: form is not None and form.type != "text",
    "structured_outputs": _given,
}
"""Fields of a request that beam search does not read, and whether a value asks for anything."""


def check_beam_search(request: Any) -> None:
    """Raise ``VLLMValidationError`` naming the first field of a completion or chat request that would be dropped."""
    for name, asks in UNREAD.items():
        value = getattr(request, name, None)
        if hasattr(request, name) and asks(value):
            reason = f"beam search does not read {name}; leave out {name} or use_beam_search"
            raise VLLMValidationError(reason, parameter=name, value=value)
    # Each beam's request is for twice as many tokens as there are beams: no more can be reported.
    name = "top_logprobs" if hasattr(request, "top_logprobs") else "logprobs"
    count, most = getattr(request, name) or 0, 2 * (request.n or 1)
    if request.logprobs and not 0 <= count <= most:
        reason = (
            f"beam search with n={request.n} reports at most {most} log-probabilities a token; use {most}"
        )
        raise VLLMValidationError(reason, parameter=name, value=count)


def check_watermark(params: SamplingParams | BeamSearchParams) -> None:
    """Raise ``VLLMValidationError`` for a watermark of beams, which no parameters of sampling tell of."""
    if isinstance(params, BeamSearchParams) and params.watermarking:
        raise VLLMValidationError(REFUSED["watermarking"].reason, parameter="watermarking", value=True)
