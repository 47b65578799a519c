# SPDX-License-Identifier: Apache-2.0
"""Files and folders that a tool writes at its end, tried before anything is computed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from neuron_core.errors import ConfigError

__all__ = ["writable_file", "writable_folder"]


def writable_file(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """Callback of an option that names a file, or ``-``; raises ``ConfigError`` if it could not be written."""
    if text is None or text == "-":
        return text
    path = Path(text)
    if path.is_dir():
        raise ConfigError(option.opts[0], text, "is a folder; give a file, as outcome.json")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise ConfigError(option.opts[0], text, f"{path} cannot be written; give a file of yours")
    else:
        _try(option.opts[0], text, path.absolute().parent)
    return text


def writable_folder(context: click.Context, option: click.Parameter, folder: Path) -> Path:
    """Callback of an option that names a folder, which need not be there yet; raises ``ConfigError`` as above."""
    _try(option.opts[0], str(folder), folder.absolute())
    return folder


def _try(name: str, text: str, folder: Path) -> None:
    """Make a file where the first folder would be made, and leave none; permissions alone do not tell of all disks."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            name, text, f"{there} cannot be written ({error.strerror}); give a place in a folder of yours"
        ) from error
