# SPDX-License-Identifier: Apache-2.0
"""Subjects by name: `kind:model`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any, cast

from neuron_accuracy.errors import SubjectError
from neuron_accuracy.subjects.protocol import ENTRY_POINTS, Opener, Subject
from neuron_accuracy.subjects.secrets import public_address
from neuron_core.errors import unknown_name_hint

__all__ = ["BUILT_IN", "open_subject", "public_text", "subject_kinds"]

BUILT_IN = ("transformers", "server")


def subject_kinds() -> tuple[str, ...]:
    """Every kind of subject there is here: the two built in, and those of other distributions."""
    return (*BUILT_IN, *sorted(_added()))


def open_subject(text: str, options: Mapping[str, Any] | None = None) -> Subject:
    """Open ``kind:model``, such as ``transformers:./smollm2`` or ``server:http://localhost:8000/v1``.

    Raises ``SubjectError`` on a text of another form, an unknown kind, or a subject that cannot be opened, and
    ``ConfigError`` on an option that the kind does not know.
    """
    kind, colon, model = text.partition(":")
    if not colon or not model:
        raise SubjectError(
            f"{text!r} names no subject; KIND:MODEL does, such as transformers:{text or 'DIR'}"
        )
    return _opener(kind)(model, options or {})


def public_text(text: str) -> str:
    """``kind:model`` as it may be printed and kept: a server's address without user and password."""
    kind, colon, model = text.partition(":")
    return f"{kind}{colon}{public_address(model) if kind == 'server' else model}"


def _opener(kind: str) -> Opener:
    if kind == "transformers":
        from neuron_accuracy.subjects.transformers import open_transformers

        return open_transformers
    if kind == "server":
        from neuron_accuracy.subjects.server import open_server

        return open_server
    found = _added().get(kind, [])
    if not found:
        raise SubjectError(f"no kind of subject {kind!r}: {unknown_name_hint(kind, subject_kinds())}")
    if len(found) > 1:
        owners = ", ".join(point.dist.name if point.dist else point.value for point in found)
        raise SubjectError(f"kind of subject {kind!r}: one distribution has to provide it, found: {owners}")
    return cast(Opener, found[0].load())


def _added() -> dict[str, list[EntryPoint]]:
    added: dict[str, list[EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.name in BUILT_IN:
            raise SubjectError(f"kind of subject {point.name!r} is built in; {point.value} cannot replace it")
        added.setdefault(point.name, []).append(point)
    return added
