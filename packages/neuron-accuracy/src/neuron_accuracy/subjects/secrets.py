# SPDX-License-Identifier: Apache-2.0
"""What of an address and of an option may be printed, reported or kept."""

from __future__ import annotations

import re

__all__ = ["public_address", "public_value"]

_SECRET = re.compile(r"key|secret|passw|auth|token(?!iz)", re.IGNORECASE)


def public_address(address: str) -> str:
    """A URL without the user and the password before its host."""
    scheme, slashes, rest = address.rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"


def public_value(name: str, value: object) -> object:
    """An option's value, or ``…`` if its name, spelled rightly or wrongly, is one of a secret."""
    return "…" if _SECRET.search(name) else value
