# SPDX-License-Identifier: Apache-2.0
"""How names and numbers of an outcome's data are written for a reader."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["Cell", "cell", "is_number", "label", "titled"]

_DIGITS = 4
_UNITS = {"_bytes": "bytes", "_ms": "ms", "_s": "s", "_percent": "%"}
_WORDS = {"l2": "L2", "linf": "L∞", "kv": "KV", "id": "ID", "ulp": "ULP", "fp8": "FP8", "bc": "BC"}
_NOT_FINITE = {"nan", "inf", "-inf"}


@dataclass(frozen=True)
class Cell:
    """One value of a table."""

    text: str
    number: bool = False
    exact: str | None = None
    """The value in full where ``text`` is rounded."""


def is_number(value: Any) -> bool:
    """Whether it is drawn as a number: what is not finite arrives as a string."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (isinstance(value, str) and value in _NOT_FINITE)


def label(name: object) -> str:
    """A key of the data in words, other names as they are.

    A unit at its end is told: ``size_bytes`` is ``size (bytes)``.
    """
    return ": ".join(map(_words, str(name).split(": ")))


def _words(text: str) -> str:
    if not text.isidentifier():
        return text
    unit = next((suffix for suffix in _UNITS if text.endswith(suffix) and text != suffix), "")
    words = text.removesuffix(unit).split("_")
    shown = " ".join(_WORDS.get(word, word) for word in words)
    return f"{shown} ({_UNITS[unit]})" if unit else shown


def titled(name: object) -> str:
    """The same as a heading: keys begin with a capital, names of modules and files stay as they are."""
    text = label(name)
    return text[:1].upper() + text[1:] if str(name).isidentifier() else text


def cell(value: Any) -> Cell:
    """A scalar, or a list of scalars, in a table: four significant digits, and the exact value beside them."""
    if value is None:
        return Cell("–")
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, list | tuple):
        return Cell(", ".join(cell(item).text for item in value) or "–")
    if not is_number(value):
        return Cell(str(value))
    if isinstance(value, int):
        return Cell(str(value), number=True)
    text, exact = _rounded(float(value)), float(value)
    rounded = math.isfinite(exact) and float(text) != exact
    return Cell(text, number=True, exact=repr(exact) if rounded else None)


def _rounded(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size = abs(value)
    if 1e-3 <= size < 10**_DIGITS:
        return f"{value:.{_DIGITS}g}"
    if size >= 10**_DIGITS and size < 1e7:
        return f"{value:.0f}"
    mantissa, exponent = f"{value:.{_DIGITS - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
