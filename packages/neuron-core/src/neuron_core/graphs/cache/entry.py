# SPDX-License-Identifier: Apache-2.0
"""One entry of the compile cache: a folder whose every file its manifest lists by size and SHA-256.

``COMPLETE`` is written last and holds the SHA-256 of ``manifest.json``, so that the manifest is covered too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from neuron_core.errors import CacheError

__all__ = ["MANIFEST", "SENTINEL", "CacheEntry", "describe_files", "read_entry", "seal", "verify_entry"]

MANIFEST = "manifest.json"
SENTINEL = "COMPLETE"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class CacheEntry:
    """An entry's folder and its manifest; the manifest of a summary that cannot be read is empty."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The key it is stored under."""
        return self.path.name

    @property
    def seconds(self) -> float:
        """What compiling took; 0.0 when the manifest does not say."""
        seconds = self.manifest.get("seconds", 0.0)
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    @property
    def size_bytes(self) -> int:
        """Bytes of its files on disk, now; 0 when it is gone."""
        return _folder_bytes(self.path)

    @property
    def listed_bytes(self) -> int:
        """Bytes of the files the manifest of a verified entry lists."""
        return sum(file["size"] for file in self.manifest["files"].values())

    @property
    def last_used(self) -> float:
        """When a process last asked for it, in seconds since 1970; 0.0 when it is gone."""
        for file in (self.path / SENTINEL, self.path):
            try:
                return file.lstat().st_mtime
            except OSError:
                continue
        return 0.0


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below ``folder``, by relative name.

    Raises ``CacheError`` for a link, a device or one of the two names an entry needs itself.
    """
    described: dict[str, dict[str, Any]] = {}
    for name in sorted(_files(folder)):
        if name in (MANIFEST, SENTINEL):
            raise CacheError(f"{folder / name} would be overwritten: an artifact may not hold {name}")
        size, digest = _hash(folder / name)
        described[name] = {"sha256": digest, "size": size}
    return described


def seal(folder: Path, manifest: Mapping[str, Any] | None = None) -> None:
    """Write ``manifest.json``, unless it is there already, and then ``COMPLETE``.

    Raises ``FileExistsError`` when one of them is there: nothing is written through a link.
    """
    if manifest is not None:
        with open(folder / MANIFEST, "x", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=1, sort_keys=True))
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    with open(folder / SENTINEL, "x", encoding="utf-8") as file:
        file.write(digest)


def identity_of(folder: Path) -> tuple[int, int] | None:
    """What tells a complete entry from the one that replaces it; None when there is none."""
    try:
        status = folder.stat()
        return (status.st_ino, status.st_mtime_ns) if (folder / SENTINEL).is_file() else None
    except OSError:
        return None


def read_entry(folder: Path) -> CacheEntry:
    """An entry as its manifest describes it, its files unread; raises ``CacheError`` when that cannot be read."""
    return CacheEntry(folder, _manifest(folder)[0])


def verify_entry(folder: Path, digest: str) -> tuple[CacheEntry, int]:
    """The entry, and how many bytes were hashed; raises ``CacheError`` naming the first file that is not as listed."""
    present = _files(folder)
    manifest, content = _manifest(folder)
    sealed = _read(folder / SENTINEL)
    if sealed.decode("ascii", "replace") != hashlib.sha256(content).hexdigest():
        raise CacheError(f"{folder / MANIFEST} does not match the SHA-256 in {SENTINEL}")
    if manifest.get("key") != digest:
        raise CacheError(f"{folder / MANIFEST} belongs to the key {manifest.get('key')!r}")
    files = _listed(folder, manifest)
    unlisted = present - files.keys() - {MANIFEST, SENTINEL}
    missing = files.keys() - present
    if unlisted or missing:
        what = f"holds {sorted(unlisted)} unlisted" if unlisted else f"lacks {sorted(missing)}"
        raise CacheError(f"{folder} {what}: it is not what its manifest lists")
    total = 0
    for name, described in files.items():
        if _hash(folder / name) != described:
            raise CacheError(f"{folder / name} does not match its size and SHA-256")
        total += described[0]
    return CacheEntry(folder, manifest), total


def _manifest(folder: Path) -> tuple[dict[str, Any], bytes]:
    content = _read(folder / MANIFEST)
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{folder / MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict):
        raise CacheError(f"{folder / MANIFEST} cannot be read: it is not an object")
    return manifest, content


def _listed(folder: Path, manifest: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """``(size, sha256)`` by name, every name below the folder and every value of the right kind."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CacheError(f"{folder / MANIFEST} lists no files")
    listed: dict[str, tuple[int, str]] = {}
    for name, described in files.items():
        path = PurePosixPath(name)
        if (
            path.is_absolute()
            or ".." in path.parts
            or path.as_posix() != name
            or name in (".", MANIFEST, SENTINEL)
        ):
            raise CacheError(f"{folder / MANIFEST} lists {name!r}, which is not the name of a file below it")
        size = described.get("size") if isinstance(described, dict) else None
        digest = described.get("sha256") if isinstance(described, dict) else None
        if type(size) is not int or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise CacheError(f"{folder / MANIFEST} does not say size and SHA-256 of {name!r}")
        listed[name] = (size, digest)
    return listed


def _files(folder: Path) -> set[str]:
    """Relative names of the regular files below ``folder``; anything but files and folders is refused."""
    names: set[str] = set()
    for path, status in _walk(folder):
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise CacheError(f"{path} is {kind}; an entry holds files only")
        names.add(path.relative_to(folder).as_posix())
    return names


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below ``folder`` but folders, links not followed, ``folder`` itself neither."""
    try:
        if folder.is_symlink():
            raise CacheError(f"{folder} is a symbolic link; an entry is a folder")
        for path in folder.iterdir():
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(path)
            else:
                yield path, status
    except OSError as error:
        raise CacheError(f"{folder} cannot be read: {error}") from error


def _folder_bytes(folder: Path) -> int:
    try:
        return sum(status.st_size for _, status in _walk(folder))
    except CacheError:
        return 0  # it is being removed


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CacheError(f"{file} cannot be read: {error}") from error


def _hash(file: Path) -> tuple[int, str]:
    try:
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            return opened.tell(), digest
    except OSError as error:
        raise CacheError(f"{file} cannot be read: {error}") from error
