# SPDX-License-Identifier: Apache-2.0
"""The environment of the tools themselves: uv, nox and a pip whose behaviour we know."""

from __future__ import annotations

import shutil
from pathlib import Path

from . import places
from .console import Step

STAMP = ".complete"


def directory() -> Path:
    """Where it is: one per content of tools.txt and interpreter."""
    pinned = (places.REQUIREMENTS / "tools.txt").read_bytes()
    return places.cache_dir() / f"tools-{places.digest(pinned, places.python_for_lock())}"


def ensure() -> Path:
    """Make it if it is not there, and return its `bin` folder."""
    target = directory()
    binaries = target / "bin"
    if (target / STAMP).exists():
        return binaries
    if target.exists():  # an interrupted run
        shutil.rmtree(target)
    with Step("making the tool environment (uv, nox)") as step:
        env = places.clean_environ()
        step.run([places.python_for_lock(), "-m", "venv", target], env=env)
        command: list[str | Path] = [
            binaries / "python",
            "-m",
            "pip",
            "install",
            "--no-input",
            "--disable-pip-version-check",
        ]
        command += ["--require-hashes", "--only-binary", ":all:"]
        step.run([*command, "--requirement", places.REQUIREMENTS / "tools.txt"], env=env)
        (target / STAMP).touch()
    return binaries


def pip(binaries: Path) -> list[str | Path]:
    """The command that runs pip."""
    return [binaries / "python", "-m", "pip"]


def environ(binaries: Path) -> dict[str, str]:
    """The environment in which the tools find each other."""
    env = places.clean_environ()
    env["PATH"] = f"{binaries}:{env.get('PATH', '')}"
    return env
