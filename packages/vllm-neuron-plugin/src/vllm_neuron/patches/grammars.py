# SPDX-License-Identifier: Apache-2.0
"""A change of how vLLM's engine compiles grammars."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["keep_grammar_backends_apart"]


def keep_grammar_backends_apart() -> None:
    """Keep a backend for each name in vLLM's ``StructuredOutputManager``."""
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_neuron.grammar_backends import backend_name, backends_of

    begin, create = StructuredOutputManager.grammar_init, StructuredOutputManager._create_grammar
    clear = StructuredOutputManager.clear_backend
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def grammar_init(self: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        held, name = backends_of(self), backend_name(request)
        with held.lock:
            self.backend = held.by_name.get(name)
            begin(self, request)
            held.by_name[name] = self.backend

    @functools.wraps(create)
    def _create_grammar(self: Any, request: Any) -> Any:
        return create(backends_of(self).bound(self, request), request)

    @functools.wraps(clear)
    def clear_backend(self: Any) -> None:
        last = self.backend
        clear(self)
        backends_of(self).destroy_others(last)

    StructuredOutputManager.grammar_init = grammar_init
    StructuredOutputManager._create_grammar = _create_grammar
    StructuredOutputManager.clear_backend = clear_backend
