# SPDX-License-Identifier: Apache-2.0
"""The pinned requirements files: one file a line, with its version, its SHA-256, its name and its size."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import places
from .console import Failure

HEADER = """\
# Written by `python3 tools/dev.py lock`; do not edit. For CPython 3.11 on Linux x86_64.
# One file a line: requirement, SHA-256, then the file's name and its size in bytes.
"""

_LINE = re.compile(
    r"(?P<requirement>\S+==\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})  # (?P<file>\S+) (?P<size>\d+)"
)
_WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")
_SDIST = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)\.tar\.gz")


@dataclass(frozen=True)
class Pin:
    """One file that a requirement is pinned to."""

    requirement: str
    """`name==version`, as pip reads it."""
    sha256: str
    file: str
    size_bytes: int

    @property
    def line(self) -> str:
        """The line of the requirements file; pip reads it up to the comment."""
        return f"{self.requirement} --hash=sha256:{self.sha256}  # {self.file} {self.size_bytes}"

    def problem(self, path: Path) -> str | None:
        """What is wrong with the copy at `path`, or None where it is the pinned file."""
        if not path.is_file():
            return "is missing"
        if (size := path.stat().st_size) != self.size_bytes:
            return f"has {size:,} bytes instead of {self.size_bytes:,}"
        if (found := places.sha256(path)) != self.sha256:
            return f"has SHA-256 {found} instead of {self.sha256}"
        return None


def pin_file(path: Path) -> Pin:
    """The pin of a downloaded wheel or source distribution."""
    match = _WHEEL.fullmatch(path.name) or _SDIST.fullmatch(path.name)
    if match is None:
        raise Failure(f"{path.name} is neither a wheel nor a .tar.gz source distribution")
    name = match["name"].replace("_", "-").lower()
    return Pin(f"{name}=={match['version']}", places.sha256(path), path.name, path.stat().st_size)


def read(path: Path) -> list[Pin]:
    """The pins of a requirements file, in its order; raises `Failure` naming a line that is not a pin."""
    pins = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise Failure(f"{path.name} line {number} is not `name==version --hash=…  # file size`: {line}")
        pins.append(Pin(match["requirement"], match["sha256"], match["file"], int(match["size"])))
    return pins


def render(pins: Iterable[Pin]) -> str:
    """The text of a requirements file."""
    return HEADER + "".join(f"{pin.line}\n" for pin in sorted(pins, key=lambda pin: pin.requirement))
