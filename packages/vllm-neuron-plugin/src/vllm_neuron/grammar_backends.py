# SPDX-License-Identifier: Apache-2.0
"""One backend of vLLM's structured outputs per name, so that a request's grammar goes to the one that took it.

With ``--structured-outputs-config.backend auto`` vLLM's front end chooses a backend for each request, and its engine
gives every grammar to the backend of the first: what only the other understands fails there.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputBackend

__all__ = ["Backends", "backend_name", "backends_of"]

_ATTRIBUTE = "_neuron_backends"


@dataclass
class Backends:
    """The backends of one manager. Masks of all of them are of one shape: the model's vocabulary decides it."""

    by_name: dict[str, StructuredOutputBackend] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def bound(self, manager: StructuredOutputManager, request: Request) -> StructuredOutputManager:
        """A view of ``manager`` that compiles with the backend of ``request``; called in a thread of its own."""
        with self.lock:
            backend = self.by_name.get(backend_name(request), manager.backend)
        view = copy.copy(manager)
        view.backend = backend
        return view

    def destroy_others(self, done: StructuredOutputBackend | None) -> None:
        """Destroy all but ``done``, which the manager has destroyed."""
        for backend in self.by_name.values():
            if backend is not done:
                backend.destroy()
        self.by_name.clear()


def backends_of(manager: Any) -> Backends:
    """Those of a manager, none at first."""
    held: Backends = manager.__dict__.setdefault(_ATTRIBUTE, Backends())
    return held


def backend_name(request: Request) -> str:
    """The backend that vLLM's front end chose for a request with a grammar."""
    params = request.sampling_params
    assert params is not None and params.structured_outputs is not None
    return str(params.structured_outputs._backend)
