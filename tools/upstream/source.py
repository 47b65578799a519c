# SPDX-License-Identifier: Apache-2.0
"""vLLM's source distribution: fetched by pip, checked against its pin, unpacked into the user's cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from devtools import places, vllm_build
from devtools.console import Failure, tail

KEPT = ("tests/", "examples/", "pyproject.toml")
"""What of the archive is unpacked: the tests, the chat templates they read, and the settings of their pytest."""

BACKEND = """\
import os

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    folder = "vllm-{version}.dist-info"
    os.makedirs(os.path.join(directory, folder))
    with open(os.path.join(directory, folder, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
    return folder
"""
"""Stands in for setuptools: pip asks a source distribution for its metadata, which vLLM's needs a torch to tell."""


def ensure(root: Path) -> Path:
    """The unpacked tree under ``root``, the folder that has ``tests`` in it; fetched where it is not there.

    Raises `Failure` where pip cannot fetch the archive, or it is not the pinned one.
    """
    pin = vllm_build.pin()
    folder = root / f"source-{pin.sha256[:12]}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".partial-") as name:
        scratch = Path(name)
        archive = fetch(scratch)
        if problem := pin.problem(archive):
            raise Failure(f"{pin.file}, as pip fetched it, {problem}; run the same command again")
        unpack(archive, scratch / "tree")
        try:
            (scratch / "tree").rename(folder)
        except OSError:  # another run was faster
            if not folder.exists():
                raise
    return folder


def fetch(scratch: Path) -> Path:
    """Let pip download the pinned archive into ``scratch``; returns its path."""
    backend = scratch / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(BACKEND.format(version=vllm_build.VERSION))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "vllm", "--no-input"]
    command += ["--no-build-isolation", "--require-hashes", "--disable-pip-version-check"]
    command += ["--dest", str(scratch), "--requirement", str(vllm_build.SDIST_PINS)]
    env = places.clean_environ({"PYTHONPATH": str(backend.parent)})
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Failure(f"pip could not fetch vLLM's source: {tail((ran.stdout + ran.stderr).splitlines())}")
    return scratch / vllm_build.pin().file


def unpack(archive: Path, target: Path) -> None:
    """Unpack what is kept of ``archive`` into the folder ``target``, without the archive's top folder."""
    target.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, inside = member.name.partition("/")
            if not any(inside == kept or inside.startswith(kept) for kept in KEPT):
                continue
            if member.isfile() and (stream := tar.extractfile(member)) is not None:
                path = target / inside
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(stream, file)
