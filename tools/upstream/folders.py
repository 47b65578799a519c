# SPDX-License-Identifier: Apache-2.0
"""Which folders of vLLM's tests are run, and which of them in the fast slice."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from devtools.console import Failure

FILE = Path(__file__).with_name("folders.toml")


@dataclass(frozen=True)
class Folder:
    """One entry of the list: what one process of pytest runs."""

    name: str
    paths: tuple[str, ...]
    """Folders and files, from vLLM's checkout."""
    timeout_s: int
    """For one test with its fixtures."""
    ignore: tuple[str, ...] = ()
    fast: tuple[str, ...] = ()
    """The files of it that the fast slice runs."""


def read(path: Path = FILE) -> dict[str, Folder]:
    """The folders by name, in the order of the file."""
    table = tomllib.loads(path.read_text())
    return {
        name: Folder(
            name=name,
            paths=tuple(entry["paths"]),
            timeout_s=entry["timeout_s"],
            ignore=tuple(entry.get("ignore", ())),
            fast=tuple(entry.get("fast", ())),
        )
        for name, entry in table.items()
    }


def choose(folders: dict[str, Folder], names: Sequence[str]) -> list[Folder]:
    """The folders called ``names``, or all; raises `Failure` for a name there is none of."""
    for name in names:
        if name not in folders:
            raise Failure(f"no folder {name!r}; there are {', '.join(folders)}")
    return [folders[name] for name in names or folders]
