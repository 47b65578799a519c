# SPDX-License-Identifier: Apache-2.0
"""The wheelhouse of this checkout and the environment `.venv` made from it."""

from __future__ import annotations

import os
from pathlib import Path

from . import pins, places, toolenv, vllm_build, wheelhouse
from .console import Failure, Step

PINS = places.REQUIREMENTS / "wheelhouse.txt"
LINK = places.ROOT / "wheelhouse"
ENVIRONMENT = places.ROOT / ".venv"
STAMP = ENVIRONMENT / ".bytecode"

SYNC = ["sync", "--frozen", "--all-packages", "--all-groups", "--extra", "demo"]
"""The arguments of uv that make `.venv`."""

LAZY = r"/(tests?|testing|triton/backends|transformers/models|scipy|sympy/\w+/tests)/"
"""What is left out of precompiling: thousands of files of which a process imports a handful, if any."""


def wheelhouse_dir() -> Path:
    """The folder the wheelhouse is in: the user's cache, or the checkout if a real folder is there."""
    if LINK.is_dir() and not LINK.is_symlink():
        return LINK
    inputs = [path.read_bytes() for path in (PINS, vllm_build.SDIST_PINS, vllm_build.BUILD_INPUT)]
    return places.cache_dir() / f"wheelhouse-{places.digest(*inputs)}"


def ensure_wheelhouse(binaries: Path, *, verify: bool = False) -> Path:
    """Fill the wheelhouse, add the vLLM built here, and link it into the checkout."""
    directory = wheelhouse_dir()
    older = sorted(places.cache_dir().glob("wheelhouse-*"))
    seeds = [path for path in older if path != directory]
    wheelhouse.fill(directory, pins.read(PINS), toolenv.pip(binaries), seeds=seeds, verify=verify)
    if not (directory / vllm_build.WHEEL).exists():
        built = vllm_build.ensure(binaries / "uv", toolenv.pip(binaries), directory)
        wheelhouse.place(built, directory / vllm_build.WHEEL)
    if directory != LINK:
        link(LINK, directory)
    return directory


def link(path: Path, target: Path) -> None:
    """Make `path` a symbolic link to `target`, in one step."""
    if path.is_symlink() and Path(os.readlink(path)) == target:
        return
    staging = path.with_name(f".{path.name}-{os.getpid()}")
    staging.unlink(missing_ok=True)
    staging.symlink_to(target)
    staging.replace(path)


def sync(binaries: Path) -> None:
    """Bring `.venv` to what uv.lock says, with every package of the workspace editable in it."""
    lock = places.ROOT / "uv.lock"
    if not lock.exists():
        raise Failure("uv.lock is missing: it is a committed file; check it out again")
    command: list[str | Path] = [binaries / "uv", *SYNC]
    with Step("syncing .venv") as step:
        env = toolenv.environ(binaries)
        step.run([*command, "--python", places.python_for_lock()], env=env, cwd=places.ROOT)
    precompile()


def precompile() -> None:
    """Write the bytecode of `.venv`.

    Where Python may not (PYTHONDONTWRITEBYTECODE), importing vLLM costs many seconds at each start.
    """
    lock = places.digest((places.ROOT / "uv.lock").read_bytes())
    if STAMP.exists() and STAMP.read_text() == lock:
        return
    major, minor = places.PYTHON_VERSION
    packages = ENVIRONMENT / "lib" / f"python{major}.{minor}" / "site-packages"
    jobs = str(min(4, os.cpu_count() or 1))
    command: list[str | Path] = [
        ENVIRONMENT / "bin" / "python",
        "-m",
        "compileall",
        "-j",
        jobs,
        "-x",
        LAZY,
        packages,
    ]
    with Step("precompiling .venv") as step:
        # Some packages carry templates that are not Python: a file that does not compile is not a failure.
        step.run(
            ["sh", "-c", '"$@" || true', "sh", *command],
            progress=lambda line: line.rpartition("/")[2].strip(),
        )
    STAMP.write_text(lock)
