# SPDX-License-Identifier: Apache-2.0
"""The subjects and prompts that a command line names, and what it leaves out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from neuron_accuracy.logits.prompts import Prompt, default_prompts, read_prompts
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.open import open_subject
from neuron_accuracy.subjects.protocol import Subject
from neuron_accuracy.subjects.secrets import public_value
from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["ROLES", "completed", "opened", "options_by_role", "prompts_of"]

ROLES = ("test", "reference", "baseline")
FULL = "float32"


def options_by_role(
    options: Sequence[str], roles: Sequence[str] = ROLES, flag: str = "--option"
) -> dict[str, dict[str, str]]:
    """``test.dtype=bfloat16`` as ``{"test": {"dtype": "bfloat16"}}``; raises ``ConfigError``."""
    given: dict[str, dict[str, str]] = {role: {} for role in roles}
    for option in options:
        name, equals, value = option.partition("=")
        role, dot, setting = name.partition(".")
        option = f"{name}{equals}{public_value(name, value)}"
        if not equals or not dot or not setting:
            raise ConfigError(flag, option, f"must be ROLE.NAME=VALUE; {roles[0]}.dtype=bfloat16 works")
        if role not in given:
            raise ConfigError(flag, option, f"no such role here; {unknown_name_hint(role, roles)}")
        given[role][setting] = value
    return given


@contextlib.contextmanager
def opened(
    texts: Mapping[str, str], options: Mapping[str, Mapping[str, str]]
) -> Iterator[dict[str, Subject]]:
    """Subjects by role, closed at the end."""
    with contextlib.ExitStack() as stack:
        subjects: dict[str, Subject] = {}
        for role, text in texts.items():
            subjects[role] = open_subject(text, options.get(role, {}))
            stack.callback(subjects[role].close)
        yield subjects


def prompts_of(path: str | None, count: int, reference: Subject) -> list[Prompt]:
    """Those of a file, or ``count`` built-in ones."""
    return default_prompts(reference, count) if path is None else read_prompts(Path(path))


def completed(
    test: str, reference: str | None, baseline: str | None, options: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Subjects by role, and their options: the reference is the test's model in transformers, in the dtypes of the test
    and of its cache, with a baseline in float32 if those are others.

    Raises ``ConfigError`` where a server's model is not known.
    """
    kind, _, model = test.partition(":")
    given = {role: dict(options.get(role, {})) for role in ("test", "reference", "baseline")}
    if reference is None:
        if kind == "server":
            raise ConfigError("--reference", None, "must be given for a server; transformers:DIR works")
        reference = f"transformers:{model}"
    texts = {"test": test, "reference": reference}
    if reference.startswith("transformers:"):
        info = _info(test, given["test"])
        own = {"dtype": (info.dtype, (FULL, "unknown")), "cache_dtype": (info.cache_dtype, ("auto",))}
        for name, (value, full) in own.items():
            if name not in given["reference"] and value not in full:
                given["reference"][name] = value
                baseline = baseline or reference
    if baseline is not None:
        texts["baseline"] = baseline
    for name, value in given["baseline"].items() if baseline is None else ():
        option = f"baseline.{name}={public_value(name, value)}"
        raise ConfigError("--option", option, "there is no baseline; --baseline KIND:MODEL names one")
    return texts, given


def _info(test: str, options: Mapping[str, str]) -> SubjectInfo:
    subject = open_subject(test, options)
    try:
        return subject.info()
    finally:
        subject.close()
