# SPDX-License-Identifier: Apache-2.0
"""The compile cache that the environment variables describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neuron_core.environ import Environment
from neuron_core.graphs.cache import CompileCache

if TYPE_CHECKING:
    from neuron_core.graphs.remote import RemoteStore

__all__ = ["configured_cache", "configured_remote"]


def configured_cache(environment: Environment, root: Path | None = None) -> CompileCache:
    """The cache at ``root`` (default ``VLLM_NEURON_CACHE_DIR``), reading through to the configured remote store."""
    return CompileCache(
        root or environment.cache_dir,
        remote=configured_remote(environment),
        max_bytes=environment.cache_max_bytes,
    )


def configured_remote(environment: Environment, url: str | None = None) -> RemoteStore | None:
    """The store at ``url`` (default ``VLLM_NEURON_REMOTE_CACHE``), or None; nothing is contacted yet.

    Raises ``ConfigError`` for an address, a digest list or a key that cannot be used.
    """
    address = url or environment.remote_cache
    if address is None:
        return None
    from neuron_core.graphs.remote import RemoteStore, TrustPolicy  # what most starts do not need

    trust = TrustPolicy.from_files(environment.trusted_digests, environment.trusted_keys)
    return RemoteStore.open(address, trust=trust, timeout_s=environment.remote_timeout_s)
