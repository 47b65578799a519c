# SPDX-License-Identifier: Apache-2.0
"""A change of how vLLM's engine compiles grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_neuron.patches.wrapping import wrapping

__all__ = ["keep_grammar_backends_apart"]


def keep_grammar_backends_apart() -> None:
    """Keep a backend for each name in vLLM's ``StructuredOutputManager``."""
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_neuron.grammar_backends import backend_name, backends_of

    @wrapping(StructuredOutputManager, "grammar_init")
    def begun(original: Callable[..., Any], self: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        held, name = backends_of(self), backend_name(request)
        with held.lock:
            self.backend = held.by_name.get(name)
            original(self, request)
            held.by_name[name] = self.backend

    @wrapping(StructuredOutputManager, "_create_grammar")
    def compiled(original: Callable[..., Any], self: Any, request: Any) -> Any:
        return original(backends_of(self).bound(self, request), request)

    @wrapping(StructuredOutputManager, "clear_backend")
    def cleared(original: Callable[..., Any], self: Any) -> None:
        last = self.backend
        original(self)
        backends_of(self).destroy_others(last)
