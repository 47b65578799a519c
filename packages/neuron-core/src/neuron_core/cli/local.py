# SPDX-License-Identifier: Apache-2.0
"""The compile cache a command works on, and finding its entries by the beginning of a key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neuron_core.environ import Environment
from neuron_core.errors import CacheError

if TYPE_CHECKING:
    from neuron_core.graphs.cache import CacheEntry, CompileCache
    from neuron_core.graphs.remote import RemoteStore

__all__ = ["cache_dir_option", "chosen", "keys_argument", "open_cache", "open_remote", "resolve", "short"]

_SHORT = 12
_CLOSEST = 3
_Function = TypeVar("_Function", bound=Callable[..., Any])


def cache_dir_option(function: _Function) -> _Function:
    """The option ``--cache-dir``; without it the cache of the environment's settings is used."""
    return click.option(
        "--cache-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="The compile cache; default: VLLM_NEURON_CACHE_DIR, or its default.",
    )(function)


def keys_argument(function: _Function) -> _Function:
    """Any number of keys, each given by an unambiguous beginning."""
    return click.argument("keys", nargs=-1, metavar="[KEY]...")(function)


def open_cache(
    cache_dir: Path | None, remote: RemoteStore | None = None, *, make: bool = False
) -> CompileCache:
    """The local cache; raises ``CacheError`` when there is none, unless it is to be made."""
    from neuron_core.graphs.cache import CompileCache

    root = (cache_dir or Environment.read().cache_dir).expanduser().absolute()
    if not make and not (root / "graphs").is_dir():
        raise CacheError(f"{root} is no compile cache; name one with --cache-dir or VLLM_NEURON_CACHE_DIR")
    return CompileCache(root, remote=remote)


def open_remote(url: str | None) -> RemoteStore:
    """The remote store at ``url``, or the configured one; a usage error when there is neither."""
    from neuron_core.graphs.configured import configured_remote

    store = configured_remote(Environment.read(), url)
    if store is None:
        raise click.UsageError("no remote cache: give --remote, or set VLLM_NEURON_REMOTE_CACHE")
    return store


def short(key: str) -> str:
    """The beginning of a key, as tables show it."""
    return key[:_SHORT]


def resolve(beginning: str, keys: Iterable[str]) -> str:
    """The one key that starts with ``beginning``; raises ``CacheError`` naming the candidates otherwise."""
    keys = sorted(keys)
    wanted = beginning.lower()
    found = [key for key in keys if key.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        length = next(n for n in range(len(wanted) + 1, 65) if len({key[:n] for key in found}) == len(found))
        shown = ", ".join(key[: max(length, _SHORT)] for key in found[:_CLOSEST])
        more = f" and {len(found) - _CLOSEST} more" if len(found) > _CLOSEST else ""
        raise CacheError(f"{beginning!r} is the beginning of {len(found)} keys: {shown}{more}")
    if not keys:
        raise CacheError(f"no entry has the key {beginning!r}: the cache is empty")
    beginnings = {key[: max(len(wanted), 1)]: key for key in reversed(keys)}
    closest = difflib.get_close_matches(wanted, beginnings, n=_CLOSEST, cutoff=0.0)
    shown = ", ".join(short(beginnings[each]) for each in closest)
    raise CacheError(f"no entry has the key {beginning!r}; closest: {shown}")


def chosen(cache: CompileCache, beginnings: Sequence[str]) -> list[CacheEntry]:
    """The entries named by the beginnings of their keys, or all of them when none is named."""
    entries = {entry.digest: entry for entry in cache.entries()}
    if not beginnings:
        return [entries[key] for key in sorted(entries)]
    return [entries[key] for key in dict.fromkeys(resolve(each, entries) for each in beginnings)]
