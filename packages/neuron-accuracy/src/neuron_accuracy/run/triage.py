# SPDX-License-Identifier: Apache-2.0
"""Task, prompt, sampling, KV cache, tensors: each level says more narrowly where a run parts from its reference."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.compare.captures import compare_captures
from neuron_accuracy.compare.local import check_modules, leaves
from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import LEFT_OUT, Finding, Level, Outcome, Severity, Verdict, read_outcome
from neuron_accuracy.kv.compare import compare_caches
from neuron_accuracy.logits.same import label
from neuron_accuracy.logits.validate import validate_logits
from neuron_accuracy.run.place import first_to_look_at
from neuron_accuracy.sampling.check import check_sampling
from neuron_accuracy.subjects.protocol import Sampling, Subject
from neuron_core.errors import NeuronError

__all__ = ["LEVELS", "SPEC", "Roles", "Triage", "clear_outcomes"]

LEVELS = ("task", "prompt", "sampling", "kv", "tensor")
SPEC = CaptureSpec(("**",), ("output.*", "input.0"), kv=True)
"""What is captured for the two narrowest levels."""

LONG_PROMPT = 72
"""Tokens of the prompt that is given twice, so that the second meets whole blocks that the first left in the cache."""

_TOOLS = {
    "task": ("tasks", "Tasks"),
    "prompt": ("logits", "Logits"),
    "sampling": ("sampling", "Sampling"),
    "kv": ("kv", "KV caches"),
    "tensor": ("compare", "Tensors"),
}
"""Tool and title by level, for an outcome of a tool that did not come to one."""

_REPORT = "report.html"
_MARK = '<meta name="generator" content="neuron-accuracy">'

Tell = Callable[[str], None]
"""Called with what is done next."""


@dataclass(frozen=True)
class Roles:
    """Who is compared. With a baseline of higher precision the reference is in the test's dtype."""

    test: Subject
    reference: Subject
    baseline: Subject | None = None

    @property
    def truth(self) -> Subject:
        """The most precise of them."""
        return self.baseline or self.reference

    def all(self) -> dict[str, Subject]:
        """By role."""
        held = {"test": self.test, "reference": self.reference}
        return held if self.baseline is None else {**held, "baseline": self.baseline}


@dataclass
class Triage:
    """One run of all levels. ``tasks`` makes the outcome of the widest, if tasks were asked for.

    ``demanded`` are the levels that were asked for by name: one of them that cannot be run is an error, any other is
    left out.
    """

    roles: Roles
    prompts: Sequence[Sequence[int]]
    folder: Path
    num_tokens: int = 12
    levels: Sequence[str] = LEVELS
    demanded: Collection[str] = ()
    texts: Sequence[str | None] | None = None
    tasks: Callable[[], Outcome] | None = None
    tell: Tell = lambda what: None
    seconds: dict[str, float] = field(default_factory=dict)
    _made: dict[str, Capture] = field(default_factory=dict, init=False, repr=False)
    _refused: NeuronError | None = field(default=None, init=False, repr=False)
    """Why there are no captures."""

    def run(self) -> Iterator[Outcome]:
        """An outcome per level as it is done; a level that a subject is not able to is an outcome with a note.

        What makes a comparison impossible at one level is that level's outcome, with an error: the others are run.
        """
        steps: dict[str, Callable[[], Outcome]] = {
            "task": self._task,
            "prompt": self._prompt,
            "sampling": self._sampling,
            "kv": self._kv,
            "tensor": self._tensor,
        }
        for level in (name for name in LEVELS if name in self.levels):
            begun = time.perf_counter()
            self.tell(level)
            try:
                outcome = steps[level]()
            except NeuronError as error:
                outcome = self._impossible(level, str(error))
            if level in self.demanded and outcome.verdict is Verdict.LEFT_OUT:
                outcome = self._impossible(level, outcome.findings[0].detail)
            self.seconds[level] = time.perf_counter() - begun
            yield outcome

    def summary(self, outcomes: Sequence[Outcome]) -> Outcome:
        """All findings, the one to look at first in front. Data: ``first``, and per level the verdict and seconds.

        If every level was left out that is an error: nothing was compared.
        """
        first = first_to_look_at(outcomes)
        others = [finding for outcome in outcomes for finding in outcome.findings if finding is not first]
        if all(outcome.verdict is Verdict.LEFT_OUT for outcome in outcomes):
            reasons = "; ".join(f"{outcome.tool}: {outcome.findings[0].detail}" for outcome in outcomes)
            detail = f"no level compared anything ({reasons})"
            others = [Finding(Level.INPUT, Verdict.ERROR, "all levels", detail, Severity.ERROR), *others]
        others.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
        rows = [
            {
                "level": level,
                "verdict": str(outcome.verdict),
                "faults": len(outcome.faults),
                "seconds": round(self.seconds[level], 1),
            }
            for level, outcome in zip(self.seconds, outcomes, strict=True)
        ]
        data = {
            "first": None if first is None else {"where": first.where, "kind": first.kind},
            "levels": rows,
        }
        findings = others if first is None else [first, *others]
        names = label(self.roles.test.info()), label(self.roles.truth.info())
        return Outcome("run", "All levels", *names, findings, data)

    def _task(self) -> Outcome:
        if self.tasks is None:
            return self._left_out(
                "tasks", "Tasks", Level.TASK, "no tasks were named; --tasks cloze,arithmetic runs two"
            )
        return self.tasks()

    def _prompt(self) -> Outcome:
        return validate_logits(
            self.roles.test,
            self.roles.reference,
            self.prompts,
            self.num_tokens,
            baseline=self.roles.baseline,
            texts=self.texts,
        )

    def _sampling(self) -> Outcome:
        if "generate" not in self.roles.test.info().abilities:
            return self._left_out("sampling", "Sampling", Level.SAMPLING, "the test generates nothing")
        return check_sampling(self.roles.test, self.prompts, num_tokens=self.num_tokens)

    def _kv(self) -> Outcome:
        if (lacking := self._lacking("kv")) is not None:
            return self._left_out("kv", "KV caches", Level.KV, lacking)
        captures = self._captures()
        return compare_caches(captures["test"], captures["reference"], captures.get("baseline"))

    def _tensor(self) -> Outcome:
        if (lacking := self._lacking("capture")) is not None:
            return self._left_out("compare", "Tensors", Level.TENSOR, lacking)
        captures = self._captures()
        outcome = compare_captures(
            captures["test"], captures["reference"], captures.get("baseline"), revisions_may_differ=True
        )
        return self._with_own_errors(outcome, captures["test"])

    def _with_own_errors(self, outcome: Outcome, test: Capture) -> Outcome:
        """What each module makes by itself, where the reference is a model whose modules can be called."""
        model = getattr(self.roles.reference, "model", None)
        if not isinstance(model, nn.Module):
            return outcome
        findings, errors = check_modules(test, leaves(model))
        known = {finding.where.partition(":")[0] for finding in outcome.faults}
        new = [finding for finding in findings if finding.where.partition(":")[0] not in known]
        rows = [{**asdict(error), "passes": error.passes} for error in errors]
        ran = {row["name"]: place for place, row in enumerate(outcome.data["modules"])}
        findings = sorted([*new, *outcome.findings], key=lambda finding: _place(finding, ran))
        return replace(outcome, findings=findings, data={**outcome.data, "own_errors": rows})

    def _lacking(self, ability: str) -> str | None:
        lacking = [
            role for role, subject in self.roles.all().items() if ability not in subject.info().abilities
        ]
        return f"{' and '.join(lacking)} cannot: no {ability}" if lacking else None

    def _left_out(self, tool: str, title: str, level: Level, why: str) -> Outcome:
        note = Finding(level, LEFT_OUT, title.lower(), why, Severity.NOTE)
        return Outcome(tool, title, label(self.roles.test.info()), label(self.roles.truth.info()), [note])

    def _impossible(self, level: str, why: str) -> Outcome:
        tool, title = _TOOLS[level]
        error = Finding(Level(level), Verdict.ERROR, title.lower(), why, Severity.ERROR)
        return Outcome(tool, title, label(self.roles.test.info()), label(self.roles.truth.info()), [error])

    def _captures(self) -> dict[str, Capture]:
        """Of all roles, over the prompts and one long prompt twice; tried once."""
        if self._refused is not None:
            raise self._refused
        if not self._made:
            try:
                self._made = self._captured(self.folder / "captures")
            except NeuronError as error:
                self._refused = error
                raise
        return self._made

    def _captured(self, root: Path) -> dict[str, Capture]:
        _clear(root)
        prompts, tokens = self._sequences()
        for role, subject in self.roles.all().items():
            self.tell(f"capture of the {role}")
            subject.capture(prompts, tokens, SPEC, root / role)
        return {role: Capture(root / role) for role in self.roles.all()}

    def _sequences(self) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
        long = [token for prompt in self.prompts for token in prompt]
        while len(long) < LONG_PROMPT:
            long += long
        # A subject may say what a sequence is bounded by: an engine, by its max_model_len.
        bounds = [getattr(subject, "max_length", None) for subject in self.roles.all().values()]
        rooms = [max(1, bound - self.num_tokens) for bound in bounds if bound is not None]
        size = min(LONG_PROMPT, *rooms) if rooms else LONG_PROMPT
        prompts: list[Sequence[int]] = [*self.prompts, long[:size], long[:size]]
        made = self.roles.truth.generate(prompts, self.num_tokens, [Sampling()] * len(prompts), 1)
        return prompts, [item.tokens for item in made]

    def write(self, outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> Path:
        """Write the report of the levels' outcomes next to the captures; raises ``AccuracyError`` if there is none."""
        from neuron_accuracy.report.write import write_report

        path = self.folder / _REPORT
        write_report(outcomes, path, title="Accuracy", about=about)
        return path


_SEVERITIES = (Severity.FAULT, Severity.ERROR, Severity.NOTE)


def clear_outcomes(folder: Path) -> None:
    """Remove an earlier run's outcomes and report, which would otherwise speak for one that does not come to its end.

    What another program wrote under these names stays.
    """
    for tool, _ in _TOOLS.values():
        with contextlib.suppress(AccuracyError):  # no outcome
            read_outcome(folder / f"{tool}.json")
            (folder / f"{tool}.json").unlink()
    report = folder / _REPORT
    if report.is_file() and _MARK.encode() in report.read_bytes()[:4096]:
        report.unlink()


def _place(finding: Finding, ran: Mapping[str, int]) -> int:
    """Where in the order of modules a finding belongs: what was wrong with the input first, notes last."""
    if finding.severity is Severity.NOTE:
        return len(ran)
    return -1 if finding.level is Level.INPUT else ran.get(finding.where.partition(",")[0], len(ran))


def _clear(root: Path) -> None:
    """Remove the captures of an earlier run; raises ``AccuracyError`` if something else is among them."""
    for path in sorted(root.iterdir()) if root.exists() else ():
        if not (path / "capture.json").is_file():
            raise AccuracyError(
                f"{path} is no capture of an earlier run; give another folder with --out, or move it"
            )
    shutil.rmtree(root, ignore_errors=True)
