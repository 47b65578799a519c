# SPDX-License-Identifier: Apache-2.0
"""Pushing: local entries become visible on the remote, each in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_core.graphs.remote.channel import Channel
from neuron_core.graphs.remote.envelope import (
    MAX_ENVELOPE_BYTES,
    Envelope,
    Kind,
    Payload,
    RefusedError,
    entry_payloads,
    local_payloads,
    request_document,
    request_record,
)
from neuron_core.graphs.remote.trust import Signer, TrustPolicy

__all__ = ["Publisher", "PushReport"]


@dataclass(frozen=True)
class PushReport:
    """What a push did.

    ``pushed`` entries were made visible, completed or signed, ``already_there`` needed nothing; likewise for
    request records. ``bytes`` is what was sent of entries' files.
    """

    pushed: int = 0
    already_there: int = 0
    requests_pushed: int = 0
    requests_already_there: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class _Item:
    """One thing to publish: its document, and the files it needs first."""

    kind: Kind
    digest: str
    document: bytes
    folder: Path
    payloads: tuple[Payload, ...]


class Publisher:
    """One push through ``channel``; see ``RemoteStore.push`` for the arguments and the rule of what stays."""

    def __init__(
        self,
        channel: Channel,
        trust: TrustPolicy,
        signer: Signer | None,
        on_progress: Callable[[int, int, str], None] | None,
    ) -> None:
        self._channel = channel
        self._trust = trust
        self._signer = signer
        self._on_progress = on_progress
        self._total = 0
        self._done = 0
        self._sent = 0

    def push(self, entries: Iterable[Path], requests: Mapping[str, dict[str, Any]]) -> PushReport:
        """Verify everything, then publish one after the other. Raises ``CacheError``."""
        items = [_entry(folder) for folder in entries]
        items += [
            _Item("requests", digest, request_document(digest, record), Path(), ())
            for digest, record in requests.items()
        ]
        self._total = sum(payload.size for item in items for payload in item.payloads)
        outcomes = [(item.kind, self._publish(item)) for item in items]
        return PushReport(
            pushed=outcomes.count(("entries", True)),
            already_there=outcomes.count(("entries", False)),
            requests_pushed=outcomes.count(("requests", True)),
            requests_already_there=outcomes.count(("requests", False)),
            bytes=self._sent,
        )

    def _publish(self, item: _Item) -> bool:
        """Whether anything was written; the envelope comes after everything it needs."""
        path = self._channel.envelope_path(item.kind, item.digest)
        present = self._present(path)
        if present is not None and self._stays(present, item):
            self._step(sum(payload.size for payload in item.payloads), item.digest)
            return False
        for payload in item.payloads:
            self._upload(item.folder, payload)
            self._step(payload.size, f"{item.digest}/{payload.path}")
        same = present is not None and present.document == item.document
        envelope = present if present is not None and same else Envelope(item.document, {})
        if self._signer is not None:
            envelope = envelope.signed(self._signer.key_id, self._signer.sign(item.document))
        self._channel.write(path, envelope.to_bytes())
        self._step(0, item.digest)
        return True

    def _present(self, path: str) -> Envelope | None:
        content = self._channel.read(path, 0, MAX_ENVELOPE_BYTES + 1)
        if content is None:
            return None
        try:
            return Envelope.from_bytes(content)
        except RefusedError:
            return None  # nobody can use it, so ours takes its place

    def _stays(self, present: Envelope, item: _Item) -> bool:
        if self._signer is not None:
            vouched = self._signer.has_signed(present.document, present.signatures)
        else:
            vouched = present.document == item.document or self._trust.approves(
                present.document, present.signatures
            )
        try:
            return vouched and all(self._has(payload) for payload in _needs(present, item))
        except RefusedError:
            return False

    def _has(self, payload: Payload) -> bool:
        return (
            payload.size == 0 or self._channel.size(self._channel.object_path(payload.sha256)) == payload.size
        )

    def _upload(self, folder: Path, payload: Payload) -> None:
        if not self._has(payload):
            path = self._channel.object_path(payload.sha256)
            self._channel.upload(path, folder / payload.path, payload.size)
            self._sent += payload.size

    def _step(self, size: int, name: str) -> None:
        self._done += size
        if self._on_progress is not None:
            self._on_progress(self._done, self._total, name)


def _entry(folder: Path) -> _Item:
    document, payloads = local_payloads(folder)
    return _Item("entries", folder.name, document, folder, payloads)


def _needs(present: Envelope, item: _Item) -> tuple[Payload, ...]:
    if item.kind == "entries":
        return entry_payloads(present.document, item.digest)
    request_record(present.document, item.digest)
    return ()
