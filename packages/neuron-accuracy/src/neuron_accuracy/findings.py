# SPDX-License-Identifier: Apache-2.0
"""What the tools say: findings, and the outcome of a tool, whose verdict is the command's exit code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from neuron_accuracy.errors import AccuracyError

__all__ = [
    "AGAINST_NOTHING",
    "FORMAT",
    "LEFT_OUT",
    "Finding",
    "Level",
    "Outcome",
    "Severity",
    "Verdict",
    "read_outcome",
    "write_outcome",
]

FORMAT = "neuron-accuracy-outcome/1"

LEFT_OUT = "left out"
"""The kind of the note of a level that was not run."""
AGAINST_NOTHING = "held against nothing"
"""The kind of the note of figures that were computed and compared with none."""


class Level(StrEnum):
    """Where in the triage a finding was made, from the widest view to the narrowest."""

    INPUT = "input"
    """What was given to the tool: files, prompts, layouts."""
    TASK = "task"
    PROMPT = "prompt"
    SAMPLING = "sampling"
    KV = "kv"
    TENSOR = "tensor"


class Severity(StrEnum):
    """Whether a finding fails the comparison."""

    FAULT = "fault"
    ERROR = "error"
    """It kept the comparison, or a part of it, from being made: neither passed nor failed."""
    NOTE = "note"


class Verdict(StrEnum):
    """What an outcome comes to."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "could not be compared"
    LEFT_OUT = "left out"
    """Nothing was compared, and nobody insisted on it."""


@dataclass(frozen=True)
class Finding:
    """One thing found, at one place."""

    level: Level
    kind: str
    """What it is, in a word or two that a program may test: ``diverges``, ``not finite``, ``missing step``."""
    where: str
    """The module, prompt, layer and head, or file."""
    detail: str
    """A sentence with the values and the limits."""
    severity: Severity = Severity.FAULT
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """All that one tool says of one comparison."""

    tool: str
    """The command's name: ``logits``, ``compare``, ``kv``, ``tasks``, ``sampling``, ``bisect``, ``replay``."""
    title: str
    test: str
    """What was tested, in a few words."""
    reference: str
    """What it was held against."""
    findings: Sequence[Finding] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON-ready tables and series of the tool, as its docs page describes them; the report draws them."""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that fail it, the first to look at first."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.FAULT)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that say what could not be compared."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.ERROR)

    @property
    def passed(self) -> bool:
        """Whether nothing fails it, and nothing that was asked for could not be compared."""
        return not self.faults and not self.errors

    @property
    def verdict(self) -> Verdict:
        """A fault outweighs what could not be compared beside it."""
        if not self.passed:
            return Verdict.FAILED if self.faults else Verdict.ERROR
        kinds = {finding.kind for finding in self.findings}
        if AGAINST_NOTHING in kinds or (kinds == {LEFT_OUT} and not self.data):
            return Verdict.LEFT_OUT
        return Verdict.PASSED

    @property
    def exit_code(self) -> int:
        """Of the command: 1 for a fault, 2 if something could not be compared, else 0."""
        return {Verdict.FAILED: 1, Verdict.ERROR: 2}.get(self.verdict, 0)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form, read back by :meth:`from_json`; numbers that are not finite become strings."""
        return {"format": FORMAT, "passed": self.passed, **_finite(asdict(self))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The outcome ``to_json`` described; raises ``AccuracyError`` when it did not."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise AccuracyError(
                f"this is no outcome of neuron-accuracy ({FORMAT}); write one with --json FILE"
            )
        try:
            findings = tuple(
                Finding(**{**item, "level": Level(item["level"]), "severity": Severity(item["severity"])})
                for item in data["findings"]
            )
            named = {name: data[name] for name in ("tool", "title", "test", "reference", "data")}
        except (KeyError, TypeError, ValueError) as error:
            raise AccuracyError(f"an outcome of neuron-accuracy is damaged: {error!r}") from error
        return cls(findings=findings, **named)


def write_outcome(outcome: Outcome, path: Path) -> None:
    """Write it as JSON; raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(outcome.to_json(), indent=1, allow_nan=False) + "\n")


def read_outcome(path: Path) -> Outcome:
    """Read one; raises ``AccuracyError`` naming the file when it is none."""
    try:
        return Outcome.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, AccuracyError) as error:
        raise AccuracyError(f"{path}: {error}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
