# SPDX-License-Identifier: Apache-2.0
"""The one file that says which of vLLM's tests cannot pass, and why."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from devtools.console import Failure

FILE = Path(__file__).with_name("expectations.toml")

KINDS = {
    "model": "names a model or a tokenizer that is too large or not to be had offline, or no family of ours",
    "answer": "asserts what a trained model of some size answers; the stand-in is random, or 135 M parameters",
    "setting": "asks for a setting that this platform refuses by name",
    "kernel": "its subject is a GPU kernel, or a backend only GPUs have",
    "package": "imports a package that the environment does not have",
    "network": "fetches something while it runs",
    "internals": "looks into a part of vLLM that this platform replaces",
    "upstream": "fails on a machine without a GPU whatever the platform is",
}
"""Why a test is listed."""

RUNNABLE = {"internals", "upstream"}
"""The kinds that say nothing is missing here: they count among the tests that can run."""

_FIELDS = {"kind", "reason", "tests", "flaky"}


@dataclass(frozen=True)
class Expectation:
    """Tests that cannot pass, for one reason."""

    kind: str
    reason: str
    patterns: tuple[str, ...]
    """Node ids, in which ``*`` stands for anything."""
    flaky: bool = False
    """Whether they may pass as well."""

    @cached_property
    def expressions(self) -> tuple[re.Pattern[str], ...]:
        """The patterns as regular expressions; the brackets of a node id mean themselves."""
        return tuple(re.compile(re.escape(word).replace(r"\*", ".*"), re.DOTALL) for word in self.patterns)

    def matches(self, node_id: str) -> bool:
        """Whether the test is one of these."""
        return any(expression.fullmatch(node_id) for expression in self.expressions)


def read(path: Path = FILE) -> list[Expectation]:
    """The expectations of a file; raises `Failure` naming the entry and what is wrong with it."""
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise Failure(f"{path.name} is not TOML: {error}") from error
    if extra := table.keys() - {"expect"}:
        raise Failure(f"{path.name}: unknown {', '.join(sorted(extra))}; entries are [[expect]] tables")
    found = [_parse(entry, f"{path.name}, entry {at}") for at, entry in enumerate(table.get("expect", []), 1)]
    seen: set[str] = set()
    for pattern in (word for each in found for word in each.patterns):
        if pattern in seen:
            raise Failure(f"{path.name}: {pattern} is listed twice")
        seen.add(pattern)
    return found


def _parse(entry: dict[str, Any], where: str) -> Expectation:
    if extra := entry.keys() - _FIELDS:
        raise Failure(f"{where}: unknown {', '.join(sorted(extra))}; there are {', '.join(sorted(_FIELDS))}")
    kind, reason, tests = entry.get("kind"), entry.get("reason"), entry.get("tests")
    if kind not in KINDS:
        raise Failure(f"{where}: kind={kind!r}; use one of {', '.join(KINDS)}")
    if not isinstance(reason, str) or not reason.strip():
        raise Failure(f"{where}: reason={reason!r}; say in a sentence why these tests cannot pass")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) and test for test in tests):
        raise Failure(f"{where}: tests={tests!r}; list node ids such as 'tests/v1/core/test_a.py::test_b'")
    flaky = entry.get("flaky", False)
    if not isinstance(flaky, bool):
        raise Failure(f"{where}: flaky={flaky!r}; use true or false")
    return Expectation(kind, reason, tuple(tests), flaky)
