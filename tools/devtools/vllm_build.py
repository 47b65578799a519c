# SPDX-License-Identifier: Apache-2.0
"""vLLM built for the `empty` target: the same Python as published, without kernels and without a CUDA torch.

The wheel is built once per recipe and user. uv.lock names it without a hash, as it does every file of a local
folder: a wheel built on another machine is as good.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from . import pins, places
from .console import Failure, Step

VERSION = "0.32.0"
WHEEL = f"vllm-{VERSION}-cp311-cp311-linux_x86_64.whl"
SDIST_PINS = places.REQUIREMENTS / "vllm-sdist.txt"
BUILD_INPUT = places.REQUIREMENTS / "vllm-build.in"

ENVIRON = {
    "VLLM_TARGET_DEVICE": "empty",
    "VLLM_VERSION_OVERRIDE": VERSION,
    # Equal timestamps inside the wheel wherever it is built.
    "SOURCE_DATE_EPOCH": "1700000000",
}

RECIPE = "1"
"""Count up when the build below changes in a way the inputs do not show."""


def directory() -> Path:
    """Where the built wheel is kept."""
    parts: list[bytes | str] = [
        SDIST_PINS.read_bytes(),
        BUILD_INPUT.read_bytes(),
        repr(sorted(ENVIRON.items())),
        RECIPE,
    ]
    return places.cache_dir() / f"vllm-{places.digest(*parts)}"


def ensure(uv: Path, pip: Sequence[str | Path], wheelhouse: Path) -> Path:
    """Build the wheel if it is not there, with build requirements from `wheelhouse`; returns its path."""
    wheel = directory() / WHEEL
    if wheel.exists():
        return wheel
    wheel.parent.mkdir(parents=True, exist_ok=True)
    for leftover in wheel.parent.glob(".partial-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".partial-") as name:
        folder = Path(name)
        environment = folder / "environment"
        with Step("making the environment that builds vLLM") as step:
            env = places.clean_environ()
            step.run([uv, "venv", "--python", places.python_for_lock(), environment], env=env)
            install: list[str | Path] = [
                uv,
                "pip",
                "install",
                "--python",
                environment,
                "--no-index",
                "--find-links",
                wheelhouse,
            ]
            # Outside the checkout, whose own uv settings name a wheelhouse that is not linked yet.
            step.run([*install, "--requirement", BUILD_INPUT], env=env, cwd=folder)
        build(environment, pip, folder)
        check(folder / WHEEL)
        (folder / WHEEL).replace(wheel)
    return wheel


def build(environment: Path, pip: Sequence[str | Path], output: Path) -> None:
    """Fetch the pinned source distribution and build it in `environment` into the folder `output`."""
    env = places.clean_environ({**ENVIRON, "TMPDIR": str(output)})
    env["PATH"] = f"{environment / 'bin'}:{env.get('PATH', '')}"
    # --no-cache-dir: pip's wheel cache does not know the variables a wheel was built under.
    command: list[str | Path] = [
        *pip,
        "--python",
        environment,
        "wheel",
        "--no-cache-dir",
        "--no-deps",
        "--no-build-isolation",
    ]
    command += ["--no-binary", "vllm", "--require-hashes", "--no-input", "--disable-pip-version-check"]
    with Step(f"building vLLM {VERSION} for the `empty` target") as step:
        step.run([*command, "--wheel-dir", output, "--requirement", SDIST_PINS], env=env)


def check(wheel: Path) -> None:
    """Raise `Failure` unless `wheel` is a whole vLLM that asks for no torch of its own."""
    if not wheel.exists():
        names = sorted(path.name for path in wheel.parent.glob("*.whl"))
        raise Failure(f"building vLLM gave {names or 'no wheel'} instead of {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        damaged = archive.testzip()
        metadata = archive.read(f"vllm-{VERSION}.dist-info/METADATA").decode()
    if damaged or "\nRequires-Dist: torch=" in metadata:
        raise Failure(
            f"{wheel.name} is not the `empty` build of vLLM {VERSION} ({damaged or 'it requires torch'})"
        )


def pin() -> pins.Pin:
    """The source distribution it is built from."""
    return pins.read(SDIST_PINS)[0]
