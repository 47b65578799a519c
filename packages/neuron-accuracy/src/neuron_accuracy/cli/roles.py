# SPDX-License-Identifier: Apache-2.0
"""Reference and baseline where the command line leaves them out."""

from __future__ import annotations

from collections.abc import Mapping

from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.open import open_subject
from neuron_core.errors import ConfigError

__all__ = ["completed"]

FULL = "float32"


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
    return texts, given


def _info(test: str, options: Mapping[str, str]) -> SubjectInfo:
    subject = open_subject(test, options)
    try:
        return subject.info()
    finally:
        subject.close()
