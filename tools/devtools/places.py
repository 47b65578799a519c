# SPDX-License-Identifier: Apache-2.0
"""Where things are: the checkout, the user's cache directory, and the lock that guards it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from .console import Failure, Step

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""

REQUIREMENTS = ROOT / "tools" / "requirements"
"""The pinned and hashed requirements files."""

PYTHON_VERSION = (3, 11)
"""The Python the lock is made for."""


def cache_dir() -> Path:
    """The folder that all checkouts of this user share."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-neuron"


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold `directory` alone: a second set-up waits for the first instead of working in the same files."""
    directory.mkdir(parents=True, exist_ok=True)
    waiting = Step("waiting for another set-up to end")
    with (directory / ".lock").open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting.update(str(directory))
                time.sleep(0.2)
        yield


def digest(*parts: bytes | str) -> str:
    """A short content digest, for folder names."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()[:12]


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    hasher = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            hasher.update(chunk)
    return hasher.hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write a stamp so that it is there whole or not at all."""
    staging = path.with_name(f"{path.name}.{os.getpid()}")
    staging.write_text(json.dumps(value, indent=1, sort_keys=True))
    staging.replace(path)


def read_json(path: Path) -> dict[str, object]:
    """Read a stamp; a missing or damaged one is an empty one."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def clean_environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for the tools: uv never downloads, and bytecode is written."""
    env = dict(os.environ)
    for name in (
        "VIRTUAL_ENV",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPATH",
        "PYTHONHOME",
        "UV_PROJECT_ENVIRONMENT",
    ):
        env.pop(name, None)
    env.update(UV_PYTHON_DOWNLOADS="never", UV_OFFLINE="1", UV_NO_PROGRESS="1", **(extra or {}))
    return env


def python_for_lock() -> str:
    """The interpreter the environments are made with; raises `Failure` where there is none."""
    wanted = ".".join(map(str, PYTHON_VERSION))
    if sys.version_info[:2] == PYTHON_VERSION and sys.implementation.name == "cpython":
        return sys.executable
    found = shutil.which(f"python{wanted}")
    probe = "import sys; print(sys.version_info[:2], sys.implementation.name)"
    if found:
        said = subprocess.run([found, "-c", probe], capture_output=True, text=True, check=False).stdout
        if said.strip() == f"{PYTHON_VERSION} cpython":
            return found
    running = ".".join(map(str, sys.version_info[:3]))
    raise Failure(
        f"the lock is for CPython {wanted}; this is {running} and no python{wanted} is on PATH. Install it "
        f"(on Debian and Ubuntu: apt install python{wanted} python{wanted}-venv), or run this script with it."
    )
