# SPDX-License-Identifier: Apache-2.0
"""Which request parameters this engine honours, field by field, and the refusal (HTTP 400) of the rest.

Every field of vLLM's ``SamplingParams`` is in exactly one of two tables, every field of ``PoolingParams`` in one of two
others; a test fails when vLLM adds one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

__all__ = [
    "HONOURED",
    "REFUSED",
    "Place",
    "Refused",
    "admission_markdown",
    "refuse_unread",
    "validate_request",
]


class Place(StrEnum):
    """Where a parameter takes effect."""

    GRAPH = "in the graph"
    HOST = "on the host, from the graph's logits"
    GRAPH_OR_HOST = (
        "in the graph; on the host, from the graph's logits, if more than 64 have more than one token"
    )
    HIDDEN_STATES = "on the host, from the graph's hidden states"
    ENGINE = "in vLLM's engine or front end"


HONOURED: dict[str, Place] = {
    "temperature": Place.GRAPH,
    "top_k": Place.GRAPH,
    "top_p": Place.GRAPH,
    "min_p": Place.GRAPH,
    "seed": Place.GRAPH,
    "structured_outputs": Place.GRAPH,
    "presence_penalty": Place.GRAPH,
    "frequency_penalty": Place.GRAPH,
    "repetition_penalty": Place.GRAPH,
    "logit_bias": Place.GRAPH,
    "allowed_token_ids": Place.GRAPH,
    "bad_words": Place.GRAPH_OR_HOST,
    "min_tokens": Place.GRAPH,
    "logprobs": Place.HOST,
    "prompt_logprobs": Place.HOST,
    "n": Place.ENGINE,
    "stop": Place.ENGINE,
    "stop_token_ids": Place.ENGINE,
    "ignore_eos": Place.ENGINE,
    "max_tokens": Place.ENGINE,
    "flat_logprobs": Place.ENGINE,
    "detokenize": Place.ENGINE,
    "skip_special_tokens": Place.ENGINE,
    "spaces_between_special_tokens": Place.ENGINE,
    "include_stop_str_in_output": Place.ENGINE,
    "output_kind": Place.ENGINE,
    "stream_interval": Place.ENGINE,
    "skip_clone": Place.ENGINE,
    "skip_reading_prefix_cache": Place.ENGINE,
    "repetition_detection": Place.ENGINE,
    # Derived by vLLM from the fields above.
    "output_text_buffer_length": Place.ENGINE,
    "_eos_token_id": Place.ENGINE,
    "_all_stop_token_ids": Place.ENGINE,
    "_bad_words_token_ids": Place.ENGINE,
    "_watermarking_skipped": Place.ENGINE,
}


@dataclass(frozen=True)
class Refused:
    """A parameter that must keep its default: ``is_set`` tells whether a request asks for it."""

    is_set: Callable[[Any], bool]
    reason: str


def _given(value: object) -> bool:
    return value is not None


REFUSED: dict[str, Refused] = {
    "thinking_token_budget": Refused(_given, "a thinking budget is not supported"),
    "watermarking": Refused(bool, "watermarking is not supported; leave it out or use false"),
    "logprob_token_ids": Refused(
        _given, "log-probabilities of chosen tokens are not supported; use logprobs"
    ),
    "prompt_logprob_token_ids": Refused(
        _given, "prompt log-probabilities of chosen tokens are not supported"
    ),
    "prompt_logprob_start": Refused(_given, "only prompt_logprobs from the first prompt token are supported"),
    "trace_decode_token_ids": Refused(_given, "forced tokens are not supported"),
    "routed_experts_prompt_start": Refused(bool, "routed experts are not returned; leave it out or use 0"),
}

POOLING_HONOURED: dict[str, Place] = {
    "use_activation": Place.HIDDEN_STATES,
    "dimensions": Place.HIDDEN_STATES,
    "skip_reading_prefix_cache": Place.ENGINE,
    "output_kind": Place.ENGINE,
    # Set by vLLM for its own poolers of tokens; a text as a whole needs none.
    "requires_token_ids": Place.ENGINE,
}

TYPE_KEY = "compressed_token_type_ids"
"""Key of ``extra_kwargs`` under which vLLM says where the second text of a pair begins."""

PAIR_KEYS = (
    TYPE_KEY,
    "max_tokens_per_query",
    "max_tokens_per_doc",
    "chat_template_kwargs",
    "cache_salt",
)
"""Keys of ``extra_kwargs`` that something reads; all but the first, vLLM's front end."""

POOLING_REFUSED: dict[str, Refused] = {
    "task": Refused(
        lambda task: task not in (None, "embed", "classify"),
        "only texts as a whole are pooled (no token-level task); use embed or classify",
    ),
    "step_tag_id": Refused(_given, "rewards of steps are not supported"),
    "returned_token_ids": Refused(_given, "rewards of steps are not supported"),
    "late_interaction_params": Refused(_given, "late interaction is not supported"),
    "extra_kwargs": Refused(
        lambda extra: bool(set(extra or ()) - {*PAIR_KEYS}),
        f"no part of this engine reads it; known keys are {', '.join(PAIR_KEYS)}, of pairs of texts",
    ),
}

REFUSED_EXTRA_ARGS = {
    "kv_transfer_params": "KV transfer is not supported",
    "ec_transfer_params": "encoder-cache transfer is not supported",
}
"""Keys of ``extra_args`` with a meaning of their own; any other key is for custom logits processors."""

PASSIVE_EXTRA_ARGS = ("kv_cache_report_mode",)
"""Keys of ``extra_args`` that vLLM's scheduler itself reads."""


WIDEST = 2**63


def validate_request(params: SamplingParams | PoolingParams, *, has_embeds: bool = False) -> None:
    """Raise ``VLLMValidationError`` naming the first parameter that cannot be honoured.

    ``has_embeds`` says that the prompt, or a part of it, is given as embeddings.
    """
    if isinstance(params, PoolingParams):
        _check_refused(params, POOLING_REFUSED)
        _check_pair(params)
        return
    _check_refused(params, REFUSED)
    _check_width(params)
    _check_prompt_logprobs(params, has_embeds)
    for name, reason in REFUSED_EXTRA_ARGS.items():
        _refuse_extra_arg(params, name, reason)


def refuse_unread(params: SamplingParams) -> None:
    """Raise ``VLLMValidationError`` for ``extra_args`` that nothing reads in an engine without logits processors."""
    for name in params.extra_args or {}:
        if name not in PASSIVE_EXTRA_ARGS:
            reason = (
                "no part of this engine reads it; leave it out, or start with --logits-processors that do"
            )
            _refuse_extra_arg(params, name, reason)


def _check_pair(params: PoolingParams) -> None:
    start = (params.extra_kwargs or {}).get(TYPE_KEY)
    is_place = isinstance(start, int) and not isinstance(start, bool) and start >= 0
    if start is not None and not (is_place and params.task == "classify"):
        reason = "the place of a second text is for classifying a pair, and a whole number; leave it out"
        raise VLLMValidationError(reason, parameter=f"extra_kwargs.{TYPE_KEY}", value=start)


def _check_refused(params: SamplingParams | PoolingParams, table: dict[str, Refused]) -> None:
    for name, refused in table.items():
        value = getattr(params, name)
        if refused.is_set(value):
            raise VLLMValidationError(refused.reason, parameter=name, value=value)


def _check_width(params: SamplingParams) -> None:
    """What the engine's process is sent holds whole numbers of 64 bits; vLLM answers a wider one with 500."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        for number in (value or ()) if name == "stop_token_ids" else (value,):
            if isinstance(number, int) and not -WIDEST <= number < WIDEST:
                reason = "must be a whole number of 64 bits, so below 2**63"
                raise VLLMValidationError(reason, parameter=name, value=number)


def _check_prompt_logprobs(params: SamplingParams, has_embeds: bool) -> None:
    if params.prompt_logprobs is not None and has_embeds:
        reason = "an embedding is no token that could have a probability; leave prompt_logprobs out"
        raise VLLMValidationError(reason, parameter="prompt_logprobs", value=params.prompt_logprobs)
    # vLLM itself sets True beside prompt_logprobs: what is found in the cache has no hidden states to score.
    if params.prompt_logprobs is not None and params.skip_reading_prefix_cache is False:
        reason = "prompt_logprobs need every prompt token computed; use true or leave it out"
        raise VLLMValidationError(reason, parameter="skip_reading_prefix_cache", value=False)


def _refuse_extra_arg(params: SamplingParams, name: str, reason: str) -> None:
    value = (params.extra_args or {}).get(name)
    if value is not None:
        raise VLLMValidationError(reason, parameter=f"extra_args.{name}", value=value)


def admission_markdown() -> str:
    """All tables as Markdown: the source of the table in ``docs/refusals.md``."""
    rows = ["| parameter | honoured |", "|---|---|"]
    rows += [f"| `{name}` | {place} |" for name, place in HONOURED.items() if not name.startswith("_")]
    rows += [f"| `{name}` | no: {refused.reason} |" for name, refused in REFUSED.items()]
    rows += [f"| `extra_args.{name}` | no: {reason} |" for name, reason in REFUSED_EXTRA_ARGS.items()]
    rows += [f"| `{name}` of a pooling request | {place} |" for name, place in POOLING_HONOURED.items()]
    rows += [f"| `{name}` of a pooling request | no: {no.reason} |" for name, no in POOLING_REFUSED.items()]
    return "\n".join(rows) + "\n"
