# SPDX-License-Identifier: Apache-2.0
"""Where a remote store lies, and how it is named in messages without its credentials."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus, unquote

import fsspec
import fsspec.config
from fsspec.registry import known_implementations

from neuron_core.errors import ConfigError

__all__ = ["SETTING", "Address", "redact"]

SETTING = "VLLM_NEURON_REMOTE_CACHE"
"""The setting an error about the address names."""

HIDDEN = "***"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_LIKE_URL = re.compile(r"@|://|\?.")
_MAX_TEXT = 300


def redact(url: str) -> str:
    """The address ``url`` without ``user:password@`` and query string; rather too much goes than too little."""
    scheme, separator, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    # Up to the last @, and before the query is cut: an AWS secret key may hold slashes, a password anything.
    _, at, place = rest.rpartition("@")
    shown = f"{scheme}{separator}{HIDDEN if at else ''}{at}{place}"
    end = min((shown.find(mark) for mark in "?#" if mark in shown), default=None)
    return shown if end is None else f"{shown[:end]}?{HIDDEN}"


@dataclass(frozen=True)
class Address:
    """A folder on a filesystem fsspec knows.

    ``protocol`` is the scheme, ``root`` the folder in that filesystem's own notation, ``options`` go to the
    filesystem's constructor, ``shown`` is the address as messages may show it.
    """

    protocol: str
    root: str
    shown: str
    options: Mapping[str, Any] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)

    @classmethod
    def parse(cls, url: str, storage_options: Mapping[str, Any] | None = None) -> Address:
        """Check an address such as ``s3://bucket/graphs`` or ``file:///mnt/graphs``; nothing is contacted.

        Raises ``ConfigError``: no scheme, an unknown one, one whose package is not installed (naming the
        wheel), a query string, a chained address, credentials the filesystem would not understand.
        """
        url = url.strip()
        shown = redact(url)
        if url.startswith("/"):
            url = shown = f"file://{url}"
        scheme, separator, rest = url.partition("://")
        if not separator or "::" in scheme or not _SCHEME.fullmatch(scheme):
            raise ConfigError(SETTING, shown, "is not one address; s3://bucket/graphs or file:///mnt/graphs")
        if "?" in rest or "#" in rest:
            raise ConfigError(
                SETTING, shown, f"has a query string; set options as FSSPEC_{scheme.upper()}_<NAME> instead"
            )
        filesystem = _filesystem_class(scheme, shown)
        try:
            from_url: dict[str, Any] = filesystem._get_kwargs_from_urls(url)
        except ValueError:
            raise ConfigError(SETTING, shown, "cannot be read; percent-encode its credentials") from None
        if "host" not in from_url and "@" in rest and set(rest.partition("/")[0]) & {"@", ":"}:
            raise ConfigError(SETTING, shown, f"{scheme}:// takes no credentials in the address; remove them")
        root = filesystem._strip_protocol(url).rstrip("/")
        if not root.strip("/") or (scheme in ("file", "local") and not rest.startswith("/")):
            raise ConfigError(SETTING, shown, "names no absolute folder; s3://bucket/graphs, file:///graphs")
        given = {**from_url, **(storage_options or {})}
        # fsspec merges its own configuration into the options; what it holds is as secret as they are.
        configured = fsspec.config.conf.get(scheme, {})
        return cls(scheme, root, shown, given, _secrets(rest, given, configured))

    def filesystem_class(self) -> type[fsspec.AbstractFileSystem]:
        """The class fsspec has for the scheme."""
        return _filesystem_class(self.protocol, self.shown)

    def path(self, *parts: str) -> str:
        """A path below the root, in the filesystem's notation."""
        return "/".join((self.root, *parts))

    def scrub(self, text: str) -> str:
        """``text`` of another library, shortened and without anything secret this address was given."""
        for secret in self.secrets:
            # A user name such as `me` is part of many harmless words.
            bound = r"\b" if len(secret) < 4 and secret.isalnum() else ""
            text = re.sub(f"{bound}{re.escape(secret)}{bound}", HIDDEN, text)
        text = " ".join(redact(word) if _LIKE_URL.search(word) else word for word in text.split())
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _filesystem_class(scheme: str, shown: str) -> type[fsspec.AbstractFileSystem]:
    try:
        found: type[fsspec.AbstractFileSystem] = fsspec.get_filesystem_class(scheme)
    except ValueError:
        hint = f"fsspec knows no filesystem {scheme}://; use s3://, file:// or another it lists"
        raise ConfigError(SETTING, shown, hint) from None
    except ImportError:
        if scheme in ("s3", "s3a"):
            hint = "the wheel s3fs is not installed; pip install 'neuron-core[s3]'"
        else:
            hint = f"its package is not installed: {known_implementations[scheme].get('err', scheme)}"
        raise ConfigError(SETTING, shown, hint) from None
    return found


def _secrets(rest: str, *options: Mapping[str, Any]) -> tuple[str, ...]:
    userinfo = rest.rpartition("@")[0]
    found = {userinfo, *userinfo.split(":", 1)}
    for values in options:
        found.update(_leaves(values))
    found |= {unquote(secret) for secret in found}
    found |= {form(secret) for secret in found for form in (lambda s: quote(s, safe=""), quote_plus)}
    return tuple(sorted(found - {""}, key=len, reverse=True))


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode(errors="replace")
    elif isinstance(value, int | float) and len(str(value)) > 4:
        # A shorter number is a port or a count, and replacing it would make every message unreadable.
        yield str(value)
