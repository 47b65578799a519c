# SPDX-License-Identifier: Apache-2.0
"""The commands of `tools/dev.py`."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from . import lock, places, project, toolenv
from .console import Failure

CHECKS = ["tests", "lint", "types", "imports", "wheels"]
"""The nox sessions that `test` runs."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command that was parsed; returns the exit code."""
    check_host()
    if arguments.command == "lock":
        return lock.run(upgrade=arguments.upgrade)
    with places.exclusive(places.cache_dir()):
        binaries = toolenv.ensure()
        project.ensure_wheelhouse(binaries, verify=getattr(arguments, "verify", False))
        if arguments.command in ("sync", "demo", "test"):
            project.sync(binaries)
    if arguments.command == "demo":
        _demo(arguments.question)
    if arguments.command == "test":
        _nox(binaries, ["-s", *CHECKS])
    if arguments.command == "nox":
        _nox(binaries, arguments.arguments)
    print(
        f"ready: {project.ENVIRONMENT.relative_to(places.ROOT)} (activate it, or run .venv/bin/vllm serve …)"
    )
    return 0


def check_host() -> None:
    """Raise `Failure` where this set-up cannot work at all, before anything is fetched."""
    machine = f"{sys.platform} {platform.machine()}"
    if machine != "linux x86_64":
        raise Failure(
            f"the lock is for linux x86_64, and this is {machine}; install the packages with pip instead"
        )
    if shutil.which("g++") is None:
        raise Failure(
            "g++ is missing: the CPU device compiles with it (on Debian and Ubuntu: apt install g++)"
        )


def _nox(binaries: Path, arguments: Sequence[str]) -> NoReturn:
    command: list[str | Path] = [binaries / "python", "-m", "nox", "--noxfile", places.ROOT / "noxfile.py"]
    _become([*command, *arguments], toolenv.environ(binaries))


def _demo(question: str | None) -> NoReturn:
    command: list[str | Path] = [project.ENVIRONMENT / "bin" / "python", places.ROOT / "tools" / "demo.py"]
    command += ["--cache-dir", places.cache_dir() / "demo"]
    if question is not None:
        command += ["--question", question]
    _become(command, places.clean_environ())


def _become(command: Sequence[str | Path], env: Mapping[str, str]) -> NoReturn:
    """Replace this process, so that a signal reaches what really runs."""
    sys.stdout.flush()
    os.chdir(places.ROOT)
    os.execve(command[0], [str(word) for word in command], dict(env))
