# SPDX-License-Identifier: Apache-2.0
"""The small JSON file that makes an entry visible, and the documents it carries.

Everything here reads bytes that anybody may have written: it parses JSON, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from neuron_core.errors import CacheError
from neuron_core.graphs.cache.entry import MANIFEST, SENTINEL, verify_entry

__all__ = [
    "Envelope",
    "Kind",
    "Payload",
    "RefusedError",
    "check_digest",
    "entry_payloads",
    "local_payloads",
    "request_document",
    "request_record",
]

Kind = Literal["entries", "requests"]
"""What an envelope holds, which is also the name of its folder on the remote."""

FORMAT = 1
MAX_ENVELOPE_BYTES = 16 << 20
MAX_FILE_BYTES = 64 << 30
MAX_FILES = 10_000
MAX_SIGNATURES = 16
_HEX = re.compile(r"[0-9a-f]{64}")
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_MAX_NAME = 255
_MAX_PATH = 1024


class RefusedError(CacheError):
    """A remote document or object that must not be used; the message says why."""


@dataclass(frozen=True)
class Payload:
    """One file of an entry: its path in the entry's folder, its SHA-256 in hex and its size in bytes."""

    path: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Envelope:
    """A document's exact bytes and the ed25519 signatures over them, by key id."""

    document: bytes
    signatures: Mapping[str, bytes]

    @property
    def sha256(self) -> str:
        """What a digest list has to hold to approve the document."""
        return hashlib.sha256(self.document).hexdigest()

    def signed(self, key_id: str, signature: bytes) -> Envelope:
        """The same document with one signature more; the oldest ones make room if there are too many."""
        others = [pair for pair in self.signatures.items() if pair[0] != key_id]
        return Envelope(self.document, dict([*others, (key_id, signature)][-MAX_SIGNATURES:]))

    def to_bytes(self) -> bytes:
        """The envelope file's content; ``CacheError`` if the document is not UTF-8 or too large."""
        try:
            text = self.document.decode()
        except UnicodeDecodeError as error:
            raise CacheError(f"a manifest that is not UTF-8 cannot be pushed: {error}") from error
        signatures = [
            {"key": key, "signature": base64.b64encode(signature).decode()}
            for key, signature in self.signatures.items()
        ]
        content = json.dumps({"format": FORMAT, "document": text, "signatures": signatures}).encode()
        if len(content) > MAX_ENVELOPE_BYTES:
            raise CacheError(
                f"a manifest of {len(content)} bytes cannot be pushed; {MAX_ENVELOPE_BYTES} is the most"
            )
        return content

    @classmethod
    def from_bytes(cls, content: bytes) -> Envelope:
        """Read an envelope file; ``RefusedError`` for anything ``to_bytes`` would not have written."""
        if len(content) > MAX_ENVELOPE_BYTES:
            raise RefusedError(f"its envelope is larger than {MAX_ENVELOPE_BYTES} bytes")
        parsed = _object(_parse(content, "envelope"), {"format", "document", "signatures"}, "envelope")
        if parsed["format"] != FORMAT or isinstance(parsed["format"], bool):
            raise RefusedError(
                f"its envelope has format {parsed['format']!r:.40}; this version reads {FORMAT}"
            )
        document, listed = parsed["document"], parsed["signatures"]
        if not isinstance(document, str) or not isinstance(listed, list) or len(listed) > MAX_SIGNATURES:
            raise RefusedError("its envelope is malformed")
        try:
            return cls(document.encode(), dict(map(_signature, listed)))
        except UnicodeEncodeError:
            raise RefusedError("its document is not UTF-8") from None


def check_digest(digest: str) -> str:
    """``digest`` if it is a SHA-256 in hex, and so fit to be a file's name; else ``CacheError``."""
    if not _HEX.fullmatch(digest):
        raise CacheError(f"{digest!r:.100} is not a SHA-256 in lower-case hex")
    return digest


def entry_payloads(document: bytes, digest: str) -> tuple[Payload, ...]:
    """The files a manifest lists, every path checked; ``RefusedError`` if it is not a manifest of ``digest``.

    Paths are relative, stay inside the entry, and none is another's parent.
    """
    manifest = _parse(document, "manifest")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise RefusedError("its manifest lists no files")
    if manifest.get("key") != digest:
        raise RefusedError(f"its manifest is that of another key, {manifest.get('key')!r:.80}")
    files: dict[str, Any] = manifest["files"]
    if not files or len(files) > MAX_FILES:
        raise RefusedError(f"its manifest lists {len(files)} files")
    payloads = tuple(_payload(path, described) for path, described in sorted(files.items()))
    for payload in payloads:
        for parent in PurePosixPath(payload.path).parents:
            if str(parent) in files:
                raise RefusedError(f"its manifest lists {str(parent)!r:.80} as a file and as a folder")
    return payloads


def local_payloads(folder: Path) -> tuple[bytes, tuple[Payload, ...]]:
    """Manifest bytes and files of a local entry, each file hashed; ``CacheError`` if it is not whole."""
    try:
        verify_entry(folder, check_digest(folder.name))
        document = (folder / MANIFEST).read_bytes()
        return document, entry_payloads(document, folder.name)
    except (CacheError, OSError) as error:
        raise CacheError(f"{folder} is not a complete entry and is not pushed: {error}") from error


def request_document(digest: str, record: Mapping[str, Any]) -> bytes:
    """The bytes that are signed or listed for a request record."""
    return json.dumps({"record": dict(record), "request": check_digest(digest)}, sort_keys=True).encode()


def request_record(document: bytes, digest: str) -> dict[str, Any]:
    """The record in a request's document; ``RefusedError`` if it is not one of ``digest``."""
    # Exactly these two names: a signed manifest can never pass for a request record, nor the reverse.
    parsed = _object(_parse(document, "request record"), {"record", "request"}, "request record")
    record = parsed["record"]
    if parsed["request"] != digest:
        raise RefusedError(f"its record is that of another request, {parsed['request']!r:.80}")
    if not isinstance(record, dict):
        raise RefusedError("its record is malformed")
    return record


def _parse(content: bytes, what: str) -> object:
    try:
        return json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"its {what} cannot be read: {error!s:.80}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _object(parsed: object, names: set[str], what: str) -> dict[str, Any]:
    if not isinstance(parsed, dict) or parsed.keys() != names:
        raise RefusedError(f"its {what} does not hold exactly {', '.join(sorted(names))}")
    return parsed


def _signature(listed: object) -> tuple[str, bytes]:
    described = _object(listed, {"key", "signature"}, "envelope's signature")
    key, encoded = described["key"], described["signature"]
    if not isinstance(key, str) or not isinstance(encoded, str) or not _KEY_ID.fullmatch(key):
        raise RefusedError("its envelope holds a malformed signature")
    try:
        return key, base64.b64decode(encoded, validate=True)
    except ValueError:
        raise RefusedError("its envelope holds a malformed signature") from None


def _payload(path: str, described: object) -> Payload:
    names = path.split("/")
    if (
        len(path) > _MAX_PATH
        or any(name in ("", ".", "..") or len(name.encode(errors="replace")) > _MAX_NAME for name in names)
        or not path.isprintable()
        or "\\" in path
        or names[0] in (MANIFEST, SENTINEL)
    ):
        raise RefusedError(f"its manifest lists a file that is no path inside an entry: {path!r:.80}")
    facts = _object(described, {"sha256", "size"}, f"description of {path!r:.80}")
    digest, size = facts["sha256"], facts["size"]
    if not isinstance(digest, str) or not _HEX.fullmatch(digest):
        raise RefusedError(f"its manifest gives no SHA-256 for {path!r:.80}")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_FILE_BYTES:
        raise RefusedError(f"its manifest gives {path!r:.80} the size {size!r:.40}")
    return Payload(path, digest, size)
