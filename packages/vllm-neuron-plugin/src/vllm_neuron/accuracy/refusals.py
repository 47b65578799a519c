# SPDX-License-Identifier: Apache-2.0
"""What vLLM raises for a model, an option or a request that it cannot take, as an error of neuron-accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm.exceptions import VLLMError, VLLMServerError

from neuron_accuracy.errors import SubjectError
from neuron_core.errors import NeuronError

__all__ = ["request_refusals", "start_refusals"]


@contextmanager
def start_refusals(model: str) -> Iterator[None]:
    """Of reading a model's configuration and tokenizer and of starting its engine.

    Raises ``SubjectError``; errors of our own pass. vLLM and the libraries that it asks raise of every kind here:
    ``OSError`` for a missing model, ``ValidationError`` or ``AttributeError`` for a value of the wrong type.
    """
    try:
        yield
    except NeuronError:
        raise
    except Exception as error:
        hint = "" if Path(model).is_dir() else "; give a folder, or a model that is in the hub's cache"
        raise SubjectError(f"vllm-neuron:{model}: {_reasons(error)}{hint}") from error


@contextmanager
def request_refusals() -> Iterator[None]:
    """Of making and running requests; raises ``SubjectError``."""
    try:
        yield
    except VLLMServerError as error:
        raise SubjectError(f"the engine failed: {error}") from error
    except (ValueError, VLLMError) as error:
        raise SubjectError(f"the engine refuses a request: {error}") from error


def _reasons(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(dict.fromkeys(_reason(item) for item in error.errors()))
    return f"{type(error).__name__}: {error}"


def _reason(item: Mapping[str, Any]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    if message != item["msg"] or not item["loc"]:  # said by vLLM or by this plugin, with names of its own
        return message
    name = str(item["loc"][0])
    return f"{name}={item['input']!r}: {message}"
