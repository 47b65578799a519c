# SPDX-License-Identifier: Apache-2.0
"""What the report says, in the order it is read: the verdict, the first fault, the triage, and each tool's outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Finding, Level, Outcome
from neuron_accuracy.report.blocks import blocks_of
from neuron_accuracy.report.elements import Block
from neuron_accuracy.report.numbers import Cell, cell, label
from neuron_accuracy.run.place import first_to_look_at

__all__ = ["Page", "Section", "Step", "page_of"]

_TOOLS = ("tasks", "logits", "sampling", "kv", "compare", "bisect", "replay")
"""From the widest view to the narrowest; other tools follow."""
_SUMMARY = "run"
"""The tool that runs others and repeats what they find."""

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
    state: str
    """``passed``, ``failed``, or ``left out`` where nothing was compared."""
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

    @property
    def compared(self) -> Sequence[Section]:
        """The outcomes that compared something, summaries not counted."""
        return [
            section for section in self.sections if section.state != "left out" and section.tool != _SUMMARY
        ]


def page_of(outcomes: Sequence[Outcome], title: str, about: Mapping[str, object]) -> Page:
    """Lay the outcomes out in the triage's order; raises ``AccuracyError`` when there is none."""
    if not outcomes:
        raise AccuracyError(
            "there is no outcome to report; give at least one, as a tool's --json FILE wrote it"
        )
    known = {tool: place for place, tool in enumerate(_TOOLS)}
    ordered = sorted(outcomes, key=lambda outcome: known.get(outcome.tool, len(known)))
    said = [finding for outcome in outcomes if outcome.tool != _SUMMARY for finding in outcome.findings]
    ordered = [_without(outcome, said) if outcome.tool == _SUMMARY else outcome for outcome in ordered]
    sections = [_section(outcome, f"outcome-{number}") for number, outcome in enumerate(ordered, start=1)]
    shown = [finding for section in sections for finding in section.findings]
    steps = [
        _step(level, shown, {section.tool for section in sections if section.state != "left out"})
        for level in Level
    ]
    first = first_to_look_at(ordered)
    first_shown = None
    if first is not None:
        place = next(place for place, outcome in enumerate(ordered) if first in outcome.findings)
        first_shown = _said(first, True, sections[place].anchor)
    facts = [(label(name), cell(value)) for name, value in about.items()]
    return Page(title, facts, sections, steps, first_shown)


def _without(summary: Outcome, said: Sequence[Finding]) -> Outcome:
    """A summary without the findings that it repeats."""
    return replace(summary, findings=[finding for finding in summary.findings if finding not in said])


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
    blocks = blocks_of("", outcome.data)
    return Section(
        anchor,
        outcome.tool,
        outcome.title,
        outcome.test,
        outcome.reference,
        _state(outcome),
        findings,
        blocks,
    )


def _state(outcome: Outcome) -> str:
    if not outcome.passed:
        return "failed"
    left_out = outcome.findings and not outcome.data and all(f.kind == "left out" for f in outcome.findings)
    return "left out" if left_out else "passed"


def _said(finding: Finding, fault: bool, anchor: str) -> Said:
    figures = [(label(name), cell(value)) for name, value in finding.figures.items()]
    return Said(_LEVELS[finding.level], finding.kind, finding.where, finding.detail, fault, figures, anchor)


def _step(level: Level, said: Sequence[Said], ran: set[str]) -> Step:
    here = [finding for finding in said if finding.level == _LEVELS[level]]
    faults = [finding for finding in here if finding.fault]
    looked_at = bool(faults) or bool(_TOOLS_OF[level] & ran)
    first = next(iter(faults or here), None)
    return Step(_LEVELS[level], looked_at, len(faults), len(here) - len(faults), first)
