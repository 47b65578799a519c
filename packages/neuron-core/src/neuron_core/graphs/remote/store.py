# SPDX-License-Identifier: Apache-2.0
"""The remote store: compiled entries on any filesystem fsspec knows, used only if the operator approves them.

Layout under the address: ``objects/<sha256>`` (files of entries, by content), ``entries/<key>.json`` and
``requests/<key>.json`` (envelopes, written last), ``staging/`` (uploads to filesystems that rename).
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_core.errors import CacheError
from neuron_core.graphs.cache.entry import MANIFEST
from neuron_core.graphs.remote.address import Address
from neuron_core.graphs.remote.channel import CHUNK_BYTES, Channel, RemoteUnavailableError
from neuron_core.graphs.remote.envelope import (
    MAX_ENVELOPE_BYTES,
    Envelope,
    Kind,
    Payload,
    RefusedError,
    check_digest,
    entry_payloads,
    request_record,
)
from neuron_core.graphs.remote.publish import Publisher, PushReport
from neuron_core.graphs.remote.trust import DIGESTS_SETTING, KEYS_SETTING, Signer, TrustPolicy

__all__ = ["RemoteCounters", "RemoteStore"]

logger = logging.getLogger(__name__)

_ONE = {"entries": "entry", "requests": "request"}


class _UnapprovedError(RefusedError):
    """Nothing is wrong with it, but nobody vouches for it."""


@dataclass
class RemoteCounters:
    """What this process asked of the remote.

    ``hits`` and ``misses`` count entries and request records alike; ``refused`` those that were there and not
    to be used. ``bytes_downloaded`` are those of entries' files.
    """

    hits: int = 0
    misses: int = 0
    refused: int = 0
    bytes_downloaded: int = 0

    def __post_init__(self) -> None:
        """Threads that load in parallel count too."""
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one counter."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)


class RemoteStore:
    """Entries and request records at one address; make one with ``RemoteStore.open``.

    Reading never raises because of the remote: what is absent, refused or out of reach is a miss. Commands
    (``push``, ``digests``) raise ``CacheError``. Messages hold the redacted address only. Thread-safe.
    """

    def __init__(self, channel: Channel, trust: TrustPolicy) -> None:
        self.trust = trust
        self.counters = RemoteCounters()
        self._channel = channel
        self._warned = threading.Lock()

    @classmethod
    def open(
        cls,
        url: str,
        *,
        trust: TrustPolicy,
        timeout_s: float = 10.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> RemoteStore:
        """The store at ``url`` (``s3://bucket/graphs``, ``file:///mnt/graphs``, …); nothing is contacted.

        ``timeout_s`` bounds each operation; ``storage_options`` go to fsspec's filesystem. Raises
        ``ConfigError`` for an address that cannot work, naming the wheel if its filesystem is not installed.
        """
        return cls(Channel(Address.parse(url, storage_options), timeout_s), trust)

    @property
    def address(self) -> str:
        """The address as messages may show it."""
        return self._channel.address.shown

    @property
    def off_reason(self) -> str | None:
        """Why the remote is off for this process, or None while it is used."""
        return self._channel.reason

    def fetch(self, digest: str, staging: Path) -> bool:
        """Download an approved entry into ``staging``, an empty folder: its files, then ``manifest.json``.

        Each file has matched its size and SHA-256 when this returns True. False leaves the folder empty: the
        entry is absent, refused (counted, with a warning) or the remote is off. Raises ``CacheError`` for a
        digest or folder that cannot be used, ``OSError`` if the folder cannot be written.
        """
        check_digest(digest)
        if staging.is_symlink() or not staging.is_dir() or any(staging.iterdir()):
            raise CacheError(f"{staging} must be an empty folder")
        fetched = False
        try:
            fetched = self._fetch(digest, staging)
        except RefusedError as error:
            self._refuse("entries", digest, error)
        except RemoteUnavailableError:
            logger.debug("remote cache %s is off; entry %s is a miss", self.address, digest)
        finally:
            if not fetched:
                _empty(staging)
        return fetched

    def fetch_request(self, digest: str) -> dict[str, Any] | None:
        """An approved request record, or None; the same rules as for entries."""
        check_digest(digest)
        try:
            envelope = self._approved("requests", digest)
            record = None if envelope is None else request_record(envelope.document, digest)
        except RefusedError as error:
            self._refuse("requests", digest, error)
            return None
        except RemoteUnavailableError:
            logger.debug("remote cache %s is off; request %s is a miss", self.address, digest)
            return None
        self.counters.add("misses" if record is None else "hits")
        return record

    def digests(self) -> list[tuple[str, str]]:
        """Every entry present remotely: its key's digest and the SHA-256 of its manifest, trusted or not."""
        return self._documents("entries")

    def request_digests(self) -> list[tuple[str, str]]:
        """Every request record present remotely: its digest and the SHA-256 of its document."""
        return self._documents("requests")

    def push(
        self,
        entries: Iterable[Path],
        requests: Mapping[str, dict[str, Any]],
        *,
        signer: Signer | None = None,
        on_progress: Callable[[int, int, str], None] | None = None,
    ) -> PushReport:
        """Publish entries (folders named by their digest) and request records (by digest).

        All entries are verified first; files the remote lacks are sent, each entry's envelope last. An entry
        that is there already stays if it is the same, and signed by ``signer`` if one is given; another build
        of the key stays if ``signer`` signed it, or, without a signer, the trust policy approves it.
        ``on_progress(done_bytes, total_bytes, name)`` is called after each file and each envelope. Raises
        ``CacheError``: an incomplete or damaged entry, or a remote that fails.
        """
        return Publisher(self._channel, self.trust, signer, on_progress).push(entries, requests)

    def _fetch(self, digest: str, staging: Path) -> bool:
        envelope = self._approved("entries", digest)
        if envelope is None:
            self.counters.add("misses")
            return False
        for payload in entry_payloads(envelope.document, digest):
            self._download(payload, staging)
        (staging / MANIFEST).write_bytes(envelope.document)
        self.counters.add("hits")
        return True

    def _approved(self, kind: Kind, digest: str) -> Envelope | None:
        """The envelope, or None if absent; an unapproved document is not even parsed."""
        envelope = self._envelope(kind, digest)
        if envelope is not None and not self.trust.approves(envelope.document, envelope.signatures):
            raise _UnapprovedError(
                f"its document {envelope.sha256} is in no digest list and signed by no trusted key"
            )
        return envelope

    def _envelope(self, kind: Kind, digest: str) -> Envelope | None:
        content = self._channel.read(self._channel.envelope_path(kind, digest), 0, MAX_ENVELOPE_BYTES + 1)
        return None if content is None else Envelope.from_bytes(content)

    def _download(self, payload: Payload, staging: Path) -> None:
        target = staging / payload.path
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, done = hashlib.sha256(), 0
        with target.open("xb") as file:
            while done < payload.size:
                end = min(done + CHUNK_BYTES, payload.size)
                # One byte more at the end: an object longer than the manifest says is refused as well.
                content = self._channel.read(
                    self._channel.object_path(payload.sha256), done, end + (end == payload.size)
                )
                if content is None:
                    raise RefusedError(f"the object of {payload.path!r:.80} is missing; push the entry again")
                if len(content) != end - done:
                    raise RefusedError(f"the object of {payload.path!r:.80} is not {payload.size} bytes long")
                digest.update(content)
                file.write(content)
                done = end
                self.counters.add("bytes_downloaded", len(content))
        if digest.hexdigest() != payload.sha256:
            raise RefusedError(f"the object of {payload.path!r:.80} does not match its SHA-256")

    def _refuse(self, kind: Kind, digest: str, error: RefusedError) -> None:
        self.counters.add("refused")
        if not isinstance(error, _UnapprovedError) or not self.trust.is_empty:
            logger.warning("remote cache %s: %s %s is refused: %s", self.address, _ONE[kind], digest, error)
        elif self._warned.acquire(blocking=False):
            logger.warning(
                "remote cache %s: every entry is refused and compiled here, because entries hold native code"
                " and nothing is approved: set %s to a file of manifest digests (`neuron cache digests`), or"
                " %s to the public key of whoever pushes (`neuron cache keygen`)",
                self.address,
                DIGESTS_SETTING,
                KEYS_SETTING,
            )

    def _documents(self, kind: Kind) -> list[tuple[str, str]]:
        found = []
        for name in self._channel.names(self._channel.address.path(kind)):
            digest = name.removesuffix(".json")
            try:
                envelope = self._envelope(kind, check_digest(digest))
            except RemoteUnavailableError:
                raise
            except CacheError as error:
                logger.warning(
                    "remote cache %s: %s %.80r is ignored: %s", self.address, _ONE[kind], name, error
                )
                continue
            if envelope is not None:
                found.append((digest, envelope.sha256))
        return found


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
