# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face cache in which the names that vLLM's tests ask for are links to local models."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from devtools.console import Failure

from . import standins

TABLE = Path(__file__).with_name("hub.toml")
REVISION = "0" * 40
"""The one commit that every name has."""


def read_table(path: Path = TABLE) -> dict[str, list[str]]:
    """Names by stand-in; raises `Failure` for an unknown stand-in and for a name that is given twice."""
    table: dict[str, list[str]] = tomllib.loads(path.read_text())
    seen: dict[str, str] = {}
    for model, names in table.items():
        if model not in standins.MAKERS:
            raise Failure(f"{path.name}: no stand-in {model!r}; there are {', '.join(standins.MAKERS)}")
        for name in names:
            if name in seen:
                raise Failure(f"{path.name}: {name} is under {seen[name]} and under {model}")
            seen[name] = model
    return table


def ensure(root: Path, only: set[str] | None = None) -> Path:
    """Make the models of the table (or those in ``only``) and link them; returns the folder for ``HF_HOME``."""
    home = root / ("hub-" + "-".join(sorted(only)) if only else "hub")
    for model, names in read_table().items():
        if only is None or model in only:
            folder = standins.ensure(root / "models", model)
            for name in names:
                place(home, name, folder)
    return home


def place(home: Path, name: str, folder: Path) -> None:
    """Put the files of ``folder`` under ``name`` (``owner/name``, or one word) into the cache ``home``."""
    entry = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = entry / "snapshots" / REVISION
    snapshot.mkdir(parents=True, exist_ok=True)
    (entry / "refs").mkdir(exist_ok=True)
    (entry / "refs" / "main").write_text(REVISION)
    for file in folder.rglob("*"):
        link = snapshot / file.relative_to(folder)
        if file.is_file() and (not link.is_symlink() or link.readlink() != file):
            link.parent.mkdir(parents=True, exist_ok=True)
            staging = link.with_name(f".{link.name}-{os.getpid()}")
            staging.symlink_to(file)
            staging.replace(link)
