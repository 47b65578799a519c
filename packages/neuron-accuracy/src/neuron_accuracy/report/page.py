# SPDX-License-Identifier: Apache-2.0
"""What the report says, in the order it is read: the verdict, the first fault, the triage, and each tool's outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Finding, Level, Outcome, Severity, Verdict
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
    severity: Severity
    figures: Sequence[tuple[str, Cell]]
    anchor: str
    """Of the section it is in."""

    @property
    def fault(self) -> bool:
        """Whether it fails its section."""
        return self.severity is Severity.FAULT

    @property
    def error(self) -> bool:
        """Whether it says what could not be compared."""
        return self.severity is Severity.ERROR


@dataclass(frozen=True)
class Section:
    """One tool's outcome."""

    anchor: str
    tool: str
    title: str
    test: str
    reference: str
    state: Verdict
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
    errors: int
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
    told: Sequence[Verdict] = ()
    """The verdicts of comparisons that only a summary tells of."""

    @property
    def faults(self) -> int:
        """How many findings fail anything."""
        return sum(section.faults for section in self.sections)

    @property
    def errors(self) -> int:
        """How many findings say that something could not be compared."""
        return sum(finding.error for section in self.sections for finding in section.findings)

    @property
    def verdict(self) -> Verdict:
        """Of all of it; ``left out`` where nothing was compared."""
        if self.faults or self.errors:
            return Verdict.FAILED if self.faults else Verdict.ERROR
        return Verdict.PASSED if self.compared else Verdict.LEFT_OUT

    @property
    def compared(self) -> Sequence[Verdict]:
        """Of each comparison that was made or tried, summaries not counted."""
        own = [section.state for section in self.sections if section.tool != _SUMMARY]
        return [verdict for verdict in (*own, *self.told) if verdict is not Verdict.LEFT_OUT]


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
    ran = {section.tool for section in sections if section.state is not Verdict.LEFT_OUT}
    told = _told(outcomes)
    looked = {level for level in Level if _TOOLS_OF[level] & ran} | {
        level for level, verdict in told.items() if verdict is not Verdict.LEFT_OUT
    }
    steps = [_step(level, shown, level in looked) for level in Level]
    first = first_to_look_at(ordered)
    first_shown = None
    if first is not None:
        place = next(place for place, outcome in enumerate(ordered) if first in outcome.findings)
        first_shown = _said(first, sections[place].anchor)
    facts = [(label(name), cell(value)) for name, value in about.items()]
    return Page(title, facts, sections, steps, first_shown, list(told.values()))


def _told(outcomes: Sequence[Outcome]) -> dict[Level, Verdict]:
    """What summaries say of levels whose own outcome is not among those given."""
    given = {outcome.tool for outcome in outcomes}
    rows = [row for outcome in outcomes if outcome.tool == _SUMMARY for row in outcome.data.get("levels", ())]
    try:
        told = {Level(row["level"]): Verdict(row["verdict"]) for row in rows if "verdict" in row}
    except (KeyError, TypeError, ValueError) as error:
        raise AccuracyError(f"a summary of levels is damaged: {error!r}; write it anew with run") from error
    return {level: verdict for level, verdict in told.items() if not _TOOLS_OF[level] & given}


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
    findings = [_said(finding, anchor) for finding in outcome.findings]
    blocks = blocks_of("", outcome.data)
    return Section(
        anchor,
        outcome.tool,
        outcome.title,
        outcome.test,
        outcome.reference,
        outcome.verdict,
        findings,
        blocks,
    )


def _said(finding: Finding, anchor: str) -> Said:
    figures = [(label(name), cell(value)) for name, value in finding.figures.items()]
    where = _LEVELS[finding.level], finding.kind, finding.where, finding.detail
    return Said(*where, finding.severity, figures, anchor)


def _step(level: Level, said: Sequence[Said], looked_at: bool) -> Step:
    here = [finding for finding in said if finding.level == _LEVELS[level]]
    faults = [finding for finding in here if finding.fault]
    errors = [finding for finding in here if finding.error]
    notes = len(here) - len(faults) - len(errors)
    first = next(iter(faults or errors or here), None)
    return Step(_LEVELS[level], looked_at or bool(faults), len(faults), len(errors), notes, first)
