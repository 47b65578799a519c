# SPDX-License-Identifier: Apache-2.0
"""What the report says, in the order it is read: the verdict, the first fault, the triage, and each tool's outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Finding, Level, Outcome
from neuron_accuracy.report.blocks import Block, blocks_of
from neuron_accuracy.report.numbers import Cell, cell, label, titled

__all__ = ["Page", "Section", "Step", "page_of"]

_TOOLS = ("tasks", "logits", "sampling", "kv", "compare", "bisect", "replay")
"""From the widest view to the narrowest; other tools follow."""

_LEVELS = {
    Level.INPUT: "Input",
    Level.TASK: "Task",
    Level.PROMPT: "Prompt",
    Level.SAMPLING: "Sampling",
    Level.KV: "KV cache",
    Level.TENSOR: "Tensors",
}


@dataclass(frozen=True)
class Said:
    """A finding as it is shown."""

    level: str
    kind: str
    where: str
    detail: str
    fault: bool
    figures: Sequence[tuple[str, Cell]]
    anchor: str
    """Of the section it is in."""


@dataclass(frozen=True)
class Section:
    """One tool's outcome."""

    anchor: str
    tool: str
    title: str
    test: str
    reference: str
    passed: bool
    findings: Sequence[Said]
    blocks: Sequence[Block]

    @property
    def faults(self) -> int:
        """How many findings fail it."""
        return sum(finding.fault for finding in self.findings)


@dataclass(frozen=True)
class Step:
    """One level of the triage."""

    name: str
    looked_at: bool
    """Whether a tool of this level was run, or one found something there."""
    faults: int
    notes: int
    first: Said | None


@dataclass(frozen=True)
class Page:
    """All of the report."""

    title: str
    about: Sequence[tuple[str, Cell]]
    sections: Sequence[Section]
    steps: Sequence[Step]
    first_fault: Said | None

    @property
    def faults(self) -> int:
        """How many findings fail anything."""
        return sum(section.faults for section in self.sections)


def page_of(outcomes: Sequence[Outcome], title: str, about: Mapping[str, object]) -> Page:
    """Lay the outcomes out in the triage's order; raises ``AccuracyError`` when there is none."""
    if not outcomes:
        raise AccuracyError(
            "there is no outcome to report; give at least one, as a tool's --json FILE wrote it"
        )
    known = {tool: place for place, tool in enumerate(_TOOLS)}
    ordered = sorted(outcomes, key=lambda outcome: known.get(outcome.tool, len(known)))
    sections = [_section(outcome, f"outcome-{number}") for number, outcome in enumerate(ordered, start=1)]
    said = [finding for section in sections for finding in section.findings]
    ran = {outcome.tool for outcome in outcomes}
    steps = [_step(level, said, ran) for level in Level]
    first = next((step.first for step in steps if step.first is not None and step.first.fault), None)
    facts = [(label(name), cell(value)) for name, value in about.items()]
    return Page(title, facts, sections, steps, first)


_TOOLS_OF = {
    Level.INPUT: frozenset(_TOOLS),
    Level.TASK: frozenset({"tasks"}),
    Level.PROMPT: frozenset({"logits"}),
    Level.SAMPLING: frozenset({"sampling"}),
    Level.KV: frozenset({"kv"}),
    Level.TENSOR: frozenset({"compare", "bisect", "replay"}),
}


def _section(outcome: Outcome, anchor: str) -> Section:
    findings = [_said(finding, finding in outcome.faults, anchor) for finding in outcome.findings]
    blocks = [block for name, value in outcome.data.items() for block in blocks_of(titled(name), value)]
    return Section(
        anchor,
        outcome.tool,
        outcome.title,
        outcome.test,
        outcome.reference,
        outcome.passed,
        findings,
        blocks,
    )


def _said(finding: Finding, fault: bool, anchor: str) -> Said:
    figures = [(label(name), cell(value)) for name, value in finding.figures.items()]
    return Said(_LEVELS[finding.level], finding.kind, finding.where, finding.detail, fault, figures, anchor)


def _step(level: Level, said: Sequence[Said], ran: set[str]) -> Step:
    here = [finding for finding in said if finding.level == _LEVELS[level]]
    faults = [finding for finding in here if finding.fault]
    looked_at = bool(here) or bool(_TOOLS_OF[level] & ran)
    first = next(iter(faults or here), None)
    return Step(_LEVELS[level], looked_at, len(faults), len(here) - len(faults), first)
