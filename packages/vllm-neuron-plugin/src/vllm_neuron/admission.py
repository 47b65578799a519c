# SPDX-License-Identifier: Apache-2.0
"""Which request parameters this engine honours, field by field, and the refusal (HTTP 400) of the rest.

Every field of vLLM's ``SamplingParams`` is in exactly one of two tables, every field of ``PoolingParams`` in one of two
others; a test fails when vLLM adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_neuron.bad_words import settle_bad_words

if TYPE_CHECKING:
    from vllm.config import StructuredOutputsConfig, VllmConfig

__all__ = [
    "HONOURED",
    "REFUSED",
    "Place",
    "Refused",
    "admission_markdown",
    "check_utf8",
    "refuse_unread",
    "settle",
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

REFUSED_OF_GRAMMARS = {
    "whitespace_pattern": "no grammar reads it; leave it out, or use a regex or a grammar of your own",
    "disable_any_whitespace": "grammars read the server's settings alone; leave it out, or start with "
    """--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'""",
    "disable_additional_properties": "grammars read the server's settings alone; use additionalProperties of the "
    "schema, or start with "
    """--structured-outputs-config '{"backend": "guidance", "disable_additional_properties": true}'""",
}
"""Fields of ``structured_outputs`` that take effect for no request alone."""

PASSIVE_EXTRA_ARGS = ("kv_cache_report_mode",)
"""Keys of ``extra_args`` that vLLM's scheduler itself reads."""


WIDEST = 2**63

PENALTIES = (1e-10, 1e10)
LARGEST_BIAS = 1e20
"""With these limits a logit stays finite in float32: at most (1e20 + logit) * 1e10, over a temperature of 0.01."""


def validate_request(params: SamplingParams | PoolingParams, *, has_embeds: bool = False) -> None:
    """Raise ``VLLMValidationError`` naming the first parameter that cannot be honoured.

    ``has_embeds`` says that the prompt, or a part of it, is given as embeddings.
    """
    _check_sendable(params)
    if isinstance(params, PoolingParams):
        _check_refused(params, POOLING_REFUSED)
        _check_pair(params)
        return
    _check_refused(params, REFUSED)
    _check_edits(params)
    _check_prompt_logprobs(params, has_embeds)
    for name, reason in REFUSED_EXTRA_ARGS.items():
        _refuse_extra_arg(params, name, reason)


def settle(params: SamplingParams, vllm_config: VllmConfig) -> None:
    """Check a tokenized request against the engine's settings and vocabulary, and take out bad words it cannot draw.

    Raises ``VLLMValidationError`` if no token may be left to draw, for more log-probabilities than there are tokens,
    and for options of grammars that the engine has off.
    """
    vocab_size = vllm_config.model_config.get_vocab_size()
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            reason = f"the model has {vocab_size} tokens; use at most {vocab_size}, or -1 for all"
            raise VLLMValidationError(reason, parameter=name, value=count)
    if params.structured_outputs is not None:
        _check_grammar(params.structured_outputs, vllm_config.structured_outputs_config)
    if params.bad_words_token_ids:
        settle_bad_words(params, vocab_size)


def _check_grammar(asked: StructuredOutputsParams, settings: StructuredOutputsConfig) -> None:
    for name, reason in REFUSED_OF_GRAMMARS.items():
        value = getattr(asked, name)
        if value and not getattr(settings, name, False):
            raise VLLMValidationError(reason, parameter=f"structured_outputs.{name}", value=value)


def check_utf8(text: str | None, parameter: str) -> None:
    """Raise ``VLLMValidationError`` for half of a surrogate pair, which JSON may hold and no message can."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        _refuse_unsendable(parameter, text)


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


def _check_sendable(params: SamplingParams | PoolingParams) -> None:
    """What the engine's process is sent is MessagePack: whole numbers of 64 bits, and UTF-8."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        for number in (value or ()) if name == "stop_token_ids" else (value,):
            if isinstance(number, int) and not -WIDEST <= number < WIDEST:
                _refuse_unsendable(name, number)
    try:
        # Of C, so that only what is refused pays for a walk.
        msgspec.msgpack.encode(params, enc_hook=lambda _: None)
    except (OverflowError, UnicodeEncodeError):
        for path, value in _leaves(params, ""):
            if isinstance(value, int) and not -WIDEST <= value < 2 * WIDEST:
                _refuse_unsendable(path, value)
            if isinstance(value, str):
                check_utf8(value, path)
    except TypeError:
        pass  # objects that vLLM knows how to send, or that stay in this process


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Everything below ``value`` that holds nothing more, keys among them, each with its path."""
    fields = getattr(type(value), "__struct_fields__", getattr(type(value), "__dataclass_fields__", None))
    if fields is not None:
        for name in fields:
            yield from _leaves(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield path, key
            yield from _leaves(below, f"{path}.{key}")
    elif isinstance(value, list | tuple | set | frozenset):
        for index, below in enumerate(value):
            yield from _leaves(below, f"{path}[{index}]")
    else:
        yield path, value


def _refuse_unsendable(path: str, value: object) -> None:
    if isinstance(value, str):
        reason, value = "must be text that UTF-8 can say, so without half of a surrogate pair", ascii(value)
    else:
        reason = "must be a whole number of 64 bits, so below 2**63"
    # What is said of the path must itself be sendable.
    raise VLLMValidationError(
        reason, parameter=path.encode("ascii", "backslashreplace").decode(), value=value
    )


def _check_edits(params: SamplingParams) -> None:
    least, most = PENALTIES
    if not least <= params.repetition_penalty <= most:
        reason = (
            f"must be from {least:g} to {most:g}, or logits are no longer finite; 1 leaves them as they are"
        )
        raise VLLMValidationError(reason, parameter="repetition_penalty", value=params.repetition_penalty)
    for token, bias in (params.logit_bias or {}).items():
        if not abs(bias) <= LARGEST_BIAS:  # NaN among them
            reason = (
                f"must be a number from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}; "
                f"use bad_words or allowed_token_ids to forbid or force tokens"
            )
            raise VLLMValidationError(reason, parameter=f"logit_bias[{token}]", value=bias)


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
    rows += [
        f"| `structured_outputs.{name}` | no: {reason} |" for name, reason in REFUSED_OF_GRAMMARS.items()
    ]
    rows += [f"| `extra_args.{name}` | no: {reason} |" for name, reason in REFUSED_EXTRA_ARGS.items()]
    rows += [f"| `{name}` of a pooling request | {place} |" for name, place in POOLING_HONOURED.items()]
    rows += [f"| `{name}` of a pooling request | no: {no.reason} |" for name, no in POOLING_REFUSED.items()]
    return "\n".join(rows) + "\n"
