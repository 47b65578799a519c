# SPDX-License-Identifier: Apache-2.0
"""The least that tasks have to reach: a TOML file, a table for each task and a minimum for each metric.

.. code-block:: toml

    [cloze]
    acc = 0.5

    [arithmetic]
    "exact_match,number" = 0.2
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.tasks.evaluate import TaskScores
from neuron_core.errors import unknown_name_hint

__all__ = ["STANDARD_ERRORS", "Threshold", "check_thresholds", "metric_named", "read_thresholds"]

STANDARD_ERRORS = 2.0
"""A value this many standard errors below the minimum is below it; one that is nearer is not known to be."""


@dataclass(frozen=True)
class Threshold:
    """One minimum."""

    task: str
    metric: str
    minimum: float


def read_thresholds(path: Path) -> list[Threshold]:
    """The thresholds of a file, ``task.metric = minimum``; raises ``AccuracyError`` that names the file."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise AccuracyError(f"{path}: {error}; cloze.acc = 0.5 works") from error
    found = [item for task, table in tables.items() for item in _of_task(path, task, table)]
    if not found:
        raise AccuracyError(f"{path}: no thresholds; cloze.acc = 0.5 works")
    return found


def _of_task(path: Path, task: str, table: Any) -> list[Threshold]:
    if not isinstance(table, Mapping):
        raise AccuracyError(f"{path}: {task}={table!r} is no table; {task}.acc = 0.5 works")
    for metric, minimum in table.items():
        if isinstance(minimum, bool) or not isinstance(minimum, int | float):
            raise AccuracyError(f"{path}: {task}.{metric}={minimum!r} is no number; 0.5 works")
    return [Threshold(task, metric, float(minimum)) for metric, minimum in table.items()]


def check_thresholds(thresholds: Sequence[Threshold], tasks: Sequence[str]) -> None:
    """Raise ``AccuracyError`` if one is for a task that is not run."""
    for threshold in thresholds:
        if threshold.task not in tasks:
            hint = unknown_name_hint(threshold.task, tasks)
            raise AccuracyError(f"threshold {threshold.task}.{threshold.metric}: no such task is run; {hint}")


def metric_named(scores: TaskScores, name: str) -> str:
    """The full name of a metric, ``acc,none`` for ``acc``; raises ``AccuracyError`` if there is none, or several."""
    if name in scores.metrics:
        return name
    found = [full for full in scores.metrics if full.partition(",")[0] == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise AccuracyError(f"task {scores.name}: {name!r} may be any of {', '.join(found)}; name one whole")
    raise AccuracyError(f"task {scores.name}: no metric {name!r}; {unknown_name_hint(name, scores.metrics)}")
