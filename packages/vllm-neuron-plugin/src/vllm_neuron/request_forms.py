# SPDX-License-Identifier: Apache-2.0
"""What a request's form makes vLLM's front end stumble over, as the client's error (HTTP 400).

Some validators of vLLM's request models read a field before its type has been checked. What they raise then is no
validation error, which pydantic would collect, but an ``AttributeError`` or the like: HTTP 500.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError

__all__ = ["MISREAD", "as_validation_error", "check_bias", "check_priority"]

MISREAD = (AttributeError, LookupError, TypeError, ArithmeticError, RecursionError)
"""What code raises that takes a value for what it is not. Whatever has a status of its own is not among them."""
VALIDATORS = "vllm.entrypoints."
INT64 = range(-(2**63), 2**63)
LARGEST_BIAS = 100


def as_validation_error(error: Exception, value: Any) -> ValidationError | None:
    """What pydantic would have said of ``value`` had the validator of vLLM that raised ``error`` refused it.

    None if no module under ``vllm.entrypoints``, whose validators read requests, had a part in it.
    """
    passed = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    readers = [frame for frame in passed if frame.f_globals.get("__name__", "").startswith(VALIDATORS)]
    if not readers:
        return None
    reader = readers[-1].f_code.co_qualname.partition(".<locals>")[0]
    reason = f"{reader} cannot read the request: {error}. A field has another type than /openapi.json says"
    said = {"type": "value_error", "loc": (), "input": value, "ctx": {"error": ValueError(reason)}}
    return ValidationError.from_exception_data("request", [said])  # type: ignore[list-item]


def check_priority(priority: int, policy: str) -> None:
    """Raise ``VLLMValidationError`` unless the scheduler's ``policy`` reads ``priority``, and 64 bits hold it."""
    if priority not in INT64:
        reason = (
            f"a priority is an integer from {INT64.start} to {INT64.stop - 1}, not {priority}; "
            f"it is of the field `priority` or of the header X-Vllm-Priority"
        )
        raise VLLMValidationError(reason, parameter="priority", value=priority)
    if priority and policy != "priority":
        reason = (
            f"requests of this server have no priority (--scheduling-policy {policy}); use 0 or leave it out, "
            f"or start with --scheduling-policy priority"
        )
        raise VLLMValidationError(reason, parameter="priority", value=priority)


def check_bias(logit_bias: Mapping[Any, Any] | None) -> None:
    """Raise ``VLLMValidationError`` for a bias outside [-100, 100], OpenAI's range, to which vLLM clamps."""
    for token, bias in (logit_bias or {}).items():
        if isinstance(bias, int | float) and not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
            reason = f"a bias is from {-LARGEST_BIAS} to {LARGEST_BIAS}, not {bias}"
            raise VLLMValidationError(reason, parameter=f"logit_bias[{token!a}]", value=bias)
