# SPDX-License-Identifier: Apache-2.0
"""Whether a subject answers tasks as well as it has to, and as well as a reference does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from neuron_accuracy.errors import SubjectError
from neuron_accuracy.findings import AGAINST_NOTHING, Finding, Level, Outcome, Severity
from neuron_accuracy.logits.same import label
from neuron_accuracy.subjects.protocol import Subject
from neuron_accuracy.tasks.catalog import task_infos
from neuron_accuracy.tasks.evaluate import Sample, TaskScores, evaluate
from neuron_accuracy.tasks.thresholds import STANDARD_ERRORS, Threshold, check_thresholds, metric_named

__all__ = ["WORSE", "check_tasks", "sign_test"]

WORSE = 1e-3
"""How likely an equal may lose this much against the reference by chance, at most, to be called worse."""


def check_tasks(
    test: Subject,
    tasks: Sequence[str],
    *,
    reference: Subject | None = None,
    thresholds: Sequence[Threshold] = (),
    limit: int | None = None,
    client: Any = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Run tasks on a subject and, if there is one, on a reference.

    A metric is below a threshold if it is by more than two of its standard errors; nearer ones are noted. The test is
    worse than the reference if of the items that only one of the two answers right the reference has so many that an
    equal would lose like that with probability ≤ :data:`WORSE` (exact sign test). ``data["deviating"]`` are the samples
    to look at next: wrong here and right in the reference, or all wrong ones without a reference. Tasks with neither
    threshold nor reference are scored, which passes nothing: a note says so, and the outcome is ``left out``.

    ``client`` is a model of lm-eval that asks in the test's place (``evaluate.local_completions``). Raises
    ``AccuracyError`` on an unknown task, items that cannot be had, a missing metric, or a threshold of another task.
    """
    infos = task_infos(tasks)
    check_thresholds(thresholds, tasks)
    ours = evaluate(client if client is not None else test, infos, limit=limit, progress=progress)
    theirs = [] if reference is None else evaluate(reference, infos, limit=limit, progress=progress)
    findings: list[Finding] = []
    deviating: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for index, scores in enumerate(ours):
        other = theirs[index] if theirs else None
        wanted = {metric_named(scores, item.metric): item for item in thresholds if item.task == scores.name}
        findings += [found for full, item in wanted.items() for found in _below(scores, full, item.minimum)]
        findings += _worse(scores, other)
        deviating += [_described(test, scores, *pair) for pair in _deviating(scores, other)]
        rows.append(_row(scores, other, {full: item.minimum for full, item in wanted.items()}))
    findings.sort(key=lambda finding: finding.severity is not Severity.FAULT)
    if reference is None and not thresholds:
        findings.append(_against_nothing(AGAINST_NOTHING, tasks))
    elif reference is None and (free := set(tasks) - {item.task for item in thresholds}):
        findings.append(_against_nothing("no threshold", sorted(free)))
    against = label(reference.info()) if reference is not None else "thresholds" if thresholds else "nothing"
    data = {"tasks": rows, "deviating": deviating, "limit": limit}
    return Outcome("tasks", "Tasks", label(test.info()), against, findings, data)


def _against_nothing(kind: str, tasks: Sequence[str]) -> Finding:
    detail = (
        "scored only; thresholds or a reference give a verdict: --thresholds FILE, --reference KIND:MODEL"
    )
    return Finding(Level.TASK, kind, ", ".join(tasks), detail, Severity.NOTE)


def sign_test(lost: int, won: int) -> float:
    """The probability that of ``lost + won`` fair coins at least ``lost`` are heads."""
    total = lost + won
    ways = sum(math.comb(total, heads) for heads in range(lost, total + 1))
    return float(ways / 2**total)


def _below(scores: TaskScores, metric: str, minimum: float) -> list[Finding]:
    held = scores.metrics[metric]
    if held.value >= minimum:
        return []
    slack = 0.0 if math.isnan(held.stderr) else STANDARD_ERRORS * held.stderr
    near = held.value + slack >= minimum
    detail = f"{held.value:.4g} where {minimum:.4g} is the least (standard error {held.stderr:.3g})"
    figures = {"value": held.value, "minimum": minimum, "stderr": held.stderr}
    kind, severity = ("near threshold", Severity.NOTE) if near else ("below threshold", Severity.FAULT)
    return [Finding(Level.TASK, kind, f"{scores.name}.{metric}", detail, severity, figures)]


def _pairs(scores: TaskScores, other: TaskScores) -> list[tuple[Sample, Sample]]:
    theirs = {sample.place: sample for sample in other.samples}
    if {sample.place for sample in scores.samples} != set(theirs):
        raise SubjectError(f"task {scores.name}: test and reference answered other items")
    return [(sample, theirs[sample.place]) for sample in scores.samples]


def _worse(scores: TaskScores, other: TaskScores | None) -> list[Finding]:
    if other is None:
        return []
    pairs = _pairs(scores, other)
    lost = sum(theirs.right and not ours.right for ours, theirs in pairs)
    won = sum(ours.right and not theirs.right for ours, theirs in pairs)
    if not lost:
        return []
    chance = sign_test(lost, won)
    worse = chance <= WORSE
    detail = (
        f"of {len(pairs)} items {lost} are right in the reference only and {won} here only; an equal would lose like "
        f"that with probability {chance:.2g} (worse at {WORSE:g} and below)"
    )
    kind, severity = (
        ("worse than the reference", Severity.FAULT) if worse else ("deviating samples", Severity.NOTE)
    )
    figures = {"lost": float(lost), "won": float(won), "chance": chance}
    return [Finding(Level.TASK, kind, scores.name, detail, severity, figures)]


def _deviating(scores: TaskScores, other: TaskScores | None) -> list[tuple[Sample, Sample | None]]:
    if other is None:
        return [(sample, None) for sample in scores.samples if not sample.right]
    return [(ours, theirs) for ours, theirs in _pairs(scores, other) if theirs.right and not ours.right]


def _described(test: Subject, scores: TaskScores, ours: Sample, theirs: Sample | None) -> dict[str, Any]:
    """A prompt as ``logits.prompts.read_prompts`` reads it, and what became of it."""
    return {
        "task": scores.name,
        "sample": ours.place,
        "text": ours.prompt,
        "token_ids": test.encode(ours.prompt),
        "target": ours.target,
        "answer": ours.answer,
        "reference_answer": None if theirs is None else theirs.answer,
    }


def _row(scores: TaskScores, other: TaskScores | None, minimums: dict[str, float]) -> dict[str, Any]:
    return {
        "task": scores.name,
        "samples": len(scores.samples),
        "right": sum(sample.right for sample in scores.samples),
        "reference_right": None if other is None else sum(sample.right for sample in other.samples),
        "seconds": scores.seconds,
        "metrics": {
            name: {
                "value": held.value,
                "stderr": None if math.isnan(held.stderr) else held.stderr,
                "minimum": minimums.get(name),
                "reference": None
                if other is None or name not in other.metrics
                else other.metrics[name].value,
            }
            for name, held in scores.metrics.items()
        },
    }
