# SPDX-License-Identifier: Apache-2.0
"""Whether the compile cache can be kept where it is configured."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from neuron_core.doctor.check import Finding, Status
from neuron_core.environ import Environment

__all__ = ["NETWORK_TYPES", "check_cache_folder", "check_file_system", "filesystem_type"]

_GIB = 1024**3
_LOW_BYTES = 5 * _GIB
_FULL_BYTES = 256 * 1024**2

NETWORK_TYPES = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
    *(
        "fuse.glusterfs",
        "fuse.sshfs",
        "fuse.s3fs",
        "fuse.mount-s3",
        "fuse.gcsfuse",
        "fuse.ceph",
        "fuse.juicefs",
    ),
)
"""File systems that other hosts can write at the same time."""


def check_cache_folder(environment: Environment) -> list[Finding]:
    """Whether the cache directory, or the nearest one above it that exists, takes a file, and has room.

    One that cannot be written is no failure under ``VLLM_NEURON_REQUIRE_COMPILED=1`` if it has entries.
    """
    folder = environment.cache_dir
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    found = str(folder) if existing == folder else f"{folder} (not made yet)"
    try:
        with tempfile.NamedTemporaryFile(prefix="neuron-doctor-", dir=existing) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
    except OSError as error:
        return [_unwritable(environment, error)]
    free = shutil.disk_usage(existing).free
    found = f"{found}, {free / _GIB:.1f} GiB free"
    details = {"path": str(folder), "free_bytes": free}
    if free >= _LOW_BYTES:
        return [Finding("cache folder", Status.OK, found, details=details)]
    status = Status.FAIL if free < _FULL_BYTES else Status.WARN
    advice = "make room (neuron cache prune --older-than 30d), or set VLLM_NEURON_CACHE_DIR to another disk"
    return [Finding("cache folder", status, found, advice, details)]


def check_file_system(environment: Environment, mounts: Iterable[Any] | None = None) -> list[Finding]:
    """Whether the cache lies on a file system that is shared between hosts, or that is gone after a restart.

    ``mounts`` are as ``psutil.disk_partitions`` gives them, which is the default.
    """
    mounts = psutil.disk_partitions(all=True) if mounts is None else list(mounts)
    kind = filesystem_type(environment.cache_dir, mounts)
    if kind in NETWORK_TYPES:
        home = Path.home()
        at_home = environment.cache_dir.is_relative_to(home) and filesystem_type(home, mounts) == kind
        where = (
            "your home directory is a network file system, and the cache is in it" if at_home else "the cache"
        )
        advice = (
            "locks may not hold between hosts and every load goes over the network: set VLLM_NEURON_CACHE_DIR to a "
            "local disk and share compiled graphs through VLLM_NEURON_REMOTE_CACHE"
        )
        found = where if at_home else f"{where} is on a network file system"
        return [Finding("file system", Status.WARN, f"{found} ({kind})", advice, {"type": kind})]
    if kind in ("tmpfs", "ramfs"):
        advice = "fine for a trial; set VLLM_NEURON_CACHE_DIR to a disk to keep it over a restart"
        found = f"the cache is in memory ({kind}): gone with the machine or the container"
        return [Finding("file system", Status.INFO, found, advice, {"type": kind})]
    return [Finding("file system", Status.OK, kind or "unknown", details={"type": kind})]


def filesystem_type(path: Path, mounts: Iterable[Any]) -> str:
    """Type of the file system a path is on (or will be on), empty when no mount holds it."""
    real = path.resolve()
    holding = [mount for mount in mounts if real.is_relative_to(mount.mountpoint)]
    # Later mounts hide earlier ones of the same place; max keeps the first of equals, hence the reversal.
    return (
        max(reversed(holding), key=lambda mount: len(Path(mount.mountpoint).parts)).fstype if holding else ""
    )


def _unwritable(environment: Environment, error: OSError) -> Finding:
    folder = environment.cache_dir
    entries = len(list((folder / "graphs").glob("*/COMPLETE")))
    found = f"{folder} cannot be written ({error.strerror})"
    details = {"path": str(folder), "entries": entries}
    if environment.require_compiled and entries:
        found = f"{found}; it has {entries} entries, and nothing may be compiled anyway"
        return Finding("cache folder", Status.OK, found, details=details)
    advice = (
        "graphs compiled here would be lost with the process: set VLLM_NEURON_CACHE_DIR to a folder that can"
    )
    return Finding("cache folder", Status.FAIL, found, f"{advice} be written", details)
