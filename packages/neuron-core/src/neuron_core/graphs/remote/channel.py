# SPDX-License-Identifier: Apache-2.0
"""A remote filesystem behind a deadline and one switch: a remote that fails once costs one wait, then nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import fsspec.config

from neuron_core.errors import CacheError, ConfigError
from neuron_core.graphs.remote.address import Address
from neuron_core.graphs.remote.envelope import Kind

__all__ = ["CHUNK_BYTES", "Channel", "RemoteUnavailableError"]

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
"""One download request asks for at most this much; its deadline is that of one operation."""

TIMEOUT_SETTING = "VLLM_NEURON_REMOTE_TIMEOUT"
_S3 = ("s3", "s3a")
# A PUT shows the whole object or nothing here, and renaming is a copy.
_OBJECT_STORES = (*_S3, "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory")
_THREAD_SAFE = ("file", "local", "memory")

T = TypeVar("T")


class RemoteUnavailableError(CacheError):
    """The remote cannot be used by this process any more; the message names its redacted address and why."""


class _AbsentError(CacheError):
    """Nothing has this name on the remote."""


class _BeyondEndError(CacheError):
    """The object ends before the first byte asked for."""


class _Outcome:
    """What an operation's thread leaves behind."""

    done = False
    value: Any = None
    error: BaseException | None = None


class _Switch:
    """Whether an address is still in use: ``reason`` is set once, for every store of the process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.reason: str | None = None


_switches: dict[tuple[str, str], _Switch] = {}
_switches_lock = threading.Lock()


class Channel:
    """Operations on the filesystem at ``address``, each bounded by ``timeout_s``.

    Each runs in a daemon thread of its own, which is left behind when it does not return in time: no library
    below is trusted to keep a deadline, and the process can still exit. The first timeout, refused connection,
    unknown host, denied access or server error switches the address off for this process, with one warning;
    every later call raises ``RemoteUnavailableError`` at once. An absent object is an answer, not a failure.
    """

    def __init__(self, address: Address, timeout_s: float) -> None:
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ConfigError(TIMEOUT_SETTING, timeout_s, "must be a number of seconds above 0, such as 10")
        self.address = address
        self.timeout_s = timeout_s
        cls = address.filesystem_class()
        with _switches_lock:
            name = (address.protocol, f"{address.root} {sorted(address.options.items(), key=str)}")
            self._switch = _switches.setdefault(name, _Switch())
        self._instance: tuple[int, fsspec.AbstractFileSystem] | None = None
        self._instance_lock = threading.Lock()
        # Of the other filesystems most hold one connection that two threads cannot use at a time.
        free = cls.async_impl or address.protocol in _THREAD_SAFE
        self._turn: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if free else threading.Lock()
        )
        self._puts = address.protocol in _OBJECT_STORES or cls.mv is fsspec.AbstractFileSystem.mv

    @property
    def reason(self) -> str | None:
        """Why the remote is off, or None while it is in use."""
        return self._switch.reason

    def envelope_path(self, kind: Kind, digest: str) -> str:
        """Where the envelope of an entry or a request record lies."""
        return self.address.path(kind, f"{digest}.json")

    def object_path(self, sha256: str) -> str:
        """Where a file of that content lies."""
        return self.address.path("objects", sha256)

    def read(self, path: str, start: int, end: int) -> bytes | None:
        """Bytes ``start`` up to ``end`` of an object, fewer where it ends before, or None if it is absent."""
        try:
            content: bytes = self._call(lambda fs: fs.cat_file(path, start=start, end=end))
        except _AbsentError:
            return None
        except _BeyondEndError:
            return b""
        return content

    def size(self, path: str) -> int | None:
        """An object's size in bytes, or None if it is absent."""
        try:
            info: dict[str, Any] = self._call(lambda fs: fs.info(path))
        except _AbsentError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def names(self, folder: str) -> list[str]:
        """Names of the objects directly in a folder, sorted; none if it is absent."""

        def listed(fs: fsspec.AbstractFileSystem) -> list[str]:
            fs.invalidate_cache()
            return [str(name) for name in fs.ls(folder, detail=False)]

        try:
            return sorted(name.rstrip("/").rpartition("/")[2] for name in self._call(listed))
        except _AbsentError:
            return []

    def write(self, path: str, content: bytes) -> None:
        """Publish an object in one step, replacing what has its name."""
        self._call(lambda fs: self._publish(fs, path, lambda target: fs.pipe_file(target, content)))

    def upload(self, path: str, file: Path, size: int) -> None:
        """Publish a local file of ``size`` bytes; the deadline grows by ``timeout_s`` for every 8 MiB."""
        timeout_s = self.timeout_s * (1 + size // CHUNK_BYTES)
        self._call(
            lambda fs: self._publish(fs, path, lambda target: fs.put_file(str(file), target)), timeout_s
        )

    def _publish(self, fs: fsspec.AbstractFileSystem, path: str, put: Callable[[str], object]) -> None:
        if self._puts:
            put(path)
            return
        temporary = self.address.path("staging", uuid.uuid4().hex)
        for name in (temporary, path):
            fs.makedirs(name.rpartition("/")[0], exist_ok=True)
        put(temporary)
        fs.mv(temporary, path)

    def _call(self, work: Callable[[fsspec.AbstractFileSystem], T], timeout_s: float | None = None) -> T:
        outcome = _Outcome()
        thread = threading.Thread(target=self._run, args=(work, outcome), name="neuron-remote", daemon=True)
        with self._turn, self._switch.changed:
            if self._switch.reason is None:
                thread.start()
            self._switch.changed.wait_for(
                lambda: outcome.done or self._switch.reason is not None, timeout_s or self.timeout_s
            )
        code = _code(outcome.error)
        if not outcome.done:
            self._turn_off(f"no answer within {timeout_s or self.timeout_s:g} s")
        elif isinstance(outcome.error, FileNotFoundError) and code != "NoSuchBucket":
            raise _AbsentError(f"remote cache {self.address.shown}: an object or its folder does not exist")
        elif code == "InvalidRange":
            raise _BeyondEndError(f"remote cache {self.address.shown}: an object is shorter than expected")
        elif outcome.error is not None:
            self._turn_off(_describe(outcome.error, self.address))
        else:
            value: T = outcome.value
            return value
        raise RemoteUnavailableError(f"remote cache {self.address.shown} is off: {self._switch.reason}")

    def _run(self, work: Callable[[fsspec.AbstractFileSystem], object], outcome: _Outcome) -> None:
        try:
            outcome.value = work(self._filesystem())
        except BaseException as error:
            # Whatever a filesystem raises is handed to the caller, who decides what it means.
            outcome.error = error
        with self._switch.changed:
            outcome.done = True
            self._switch.changed.notify_all()

    def _turn_off(self, reason: str) -> None:
        with self._switch.changed:
            if self._switch.reason is not None:
                return
            self._switch.reason = reason
            self._switch.changed.notify_all()
        logger.warning(
            "remote cache %s is off for this process, graphs it lacks are compiled here: %s",
            self.address.shown,
            reason,
        )

    def _filesystem(self) -> fsspec.AbstractFileSystem:
        """The filesystem, made where the deadline counts: some connect as they are made. None survives a fork."""
        with self._instance_lock:
            if self._instance is None or self._instance[0] != os.getpid():
                options = dict(self.address.options)
                if self.address.protocol in _S3:
                    options = _s3_options(options, self.timeout_s)
                    _quiet_wire_logs()
                cls = self.address.filesystem_class()
                if cls.async_impl:
                    options.setdefault("loop", _own_loop())
                # Not cached by fsspec: its cache would keep the credentials beyond this object's life.
                self._instance = os.getpid(), cls(skip_instance_cache=True, **options)
            return self._instance[1]


class _DaemonExecutor(ThreadPoolExecutor):
    """Where an event loop looks up host names: threads of the standard executor are waited for at exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn`` in a daemon thread of its own."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="neuron-remote-lookup", daemon=True).start()
        return future


def _own_loop() -> asyncio.AbstractEventLoop:
    """A running event loop that never keeps the process from ending."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_DaemonExecutor())
    threading.Thread(target=loop.run_forever, name="neuron-remote-loop", daemon=True).start()
    return loop


def _s3_options(options: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The client's own limits, so that its threads and connections end too; what the user set wins."""
    config = {
        "connect_timeout": timeout_s,
        "read_timeout": timeout_s,
        "retries": {"mode": "standard", "total_max_attempts": 2},
        **fsspec.config.conf.get("s3", {}).get("config_kwargs", {}),
        **options.get("config_kwargs", {}),
    }
    return {"use_listings_cache": False, **options, "config_kwargs": config}


def _quiet_wire_logs() -> None:
    """Hold the S3 client at INFO: its DEBUG records hold session tokens and signed headers.

    An application that set the level itself keeps it.
    """
    for name in ("botocore", "aiobotocore"):
        client = logging.getLogger(name)
        if client.level == logging.NOTSET:
            client.setLevel(logging.INFO)


def _describe(error: BaseException, address: Address) -> str:
    """One clause without secrets: the kind of failure, and what the library said about it."""
    code = _code(error)
    kind = type(error).__name__ if code is None else f"{type(error).__name__} {code}"
    said = address.scrub(str(error))
    return f"{kind}: {said}" if said else kind


def _code(error: BaseException | None) -> str | None:
    """The error code an S3 server sent, which fsspec keeps only in the chain of causes."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            code = response.get("Error", {}).get("Code")
            return str(code)[:60] if code else None
        error = error.__cause__ or error.__context__
    return None
