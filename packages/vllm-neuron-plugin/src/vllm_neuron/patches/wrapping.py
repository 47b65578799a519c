# SPDX-License-Identifier: Apache-2.0
"""How a function of vLLM is given another in its place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["wrapping"]

_MARK = "_neuron_wraps"


def wrapping(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Decorate what is called in the place of ``owner.name``, with the original before its arguments.

    Once in a process: where it was done before, nothing is.
    """

    def install(replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        if hasattr(original, _MARK):
            return

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(wrapped, _MARK, True)
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(wrapped) if static else wrapped)

    return install
