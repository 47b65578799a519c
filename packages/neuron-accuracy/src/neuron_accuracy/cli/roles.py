# SPDX-License-Identifier: Apache-2.0
"""Reference and baseline where the command line leaves them out."""

from __future__ import annotations

from collections.abc import Mapping

from neuron_accuracy.subjects.open import open_subject
from neuron_core.errors import ConfigError

__all__ = ["completed"]

FULL = "float32"


def completed(
    test: str, reference: str | None, baseline: str | None, options: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Subjects by role, and their options: the reference is the test's model in transformers and, if the test is not of
    float32, in its dtype, with a baseline in float32.

    Raises ``ConfigError`` where a server's model is not known.
    """
    kind, _, model = test.partition(":")
    given = {role: dict(options.get(role, {})) for role in ("test", "reference", "baseline")}
    if reference is None:
        if kind == "server":
            raise ConfigError("--reference", None, "must be given for a server; transformers:DIR works")
        reference = f"transformers:{model}"
    texts = {"test": test, "reference": reference}
    if reference.startswith("transformers:") and "dtype" not in given["reference"]:
        dtype = _dtype(test, given["test"])
        if dtype not in (FULL, "unknown"):
            given["reference"]["dtype"] = dtype
            baseline = baseline or reference
    if baseline is not None:
        texts["baseline"] = baseline
    return texts, given


def _dtype(test: str, options: Mapping[str, str]) -> str:
    subject = open_subject(test, options)
    try:
        return subject.info().dtype
    finally:
        subject.close()
