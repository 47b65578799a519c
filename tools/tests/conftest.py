# SPDX-License-Identifier: Apache-2.0
"""Small wheels on disk, and a pip that sees nothing else."""

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from devtools import pins

MakeWheel = Callable[..., pins.Pin]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip can fetch from."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def make_wheel(index: Path) -> MakeWheel:
    """Put a wheel into the index and return its pin."""

    def make(name: str, version: str = "1.0", payload: str = "x = 1\n", metadata: str = "") -> pins.Pin:
        path = index / f"{name}-{version}-py3-none-any.whl"
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}.py", payload)
            header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            archive.writestr(f"{info}/METADATA", header + metadata)
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        return pins.pin_file(path)

    return make


@pytest.fixture
def pip() -> list[str | Path]:
    return [sys.executable, "-m", "pip"]
