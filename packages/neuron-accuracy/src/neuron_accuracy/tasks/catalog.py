# SPDX-License-Identifier: Apache-2.0
"""The tasks there are: two whose items are in this package, and some whose items a hub has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_accuracy.errors import AccuracyError
from neuron_core.errors import unknown_name_hint

__all__ = ["TASKS", "TaskInfo", "definitions", "load_spec", "task_infos"]

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class TaskInfo:
    """One task of lm-eval."""

    name: str
    primary: str
    """The metric, ``metric,filter``, whose value of a sample says whether it is right."""
    local: bool
    """Whether its items are in this package."""


TASKS = {
    info.name: info
    for info in (
        TaskInfo("cloze", "acc_norm,none", local=True),
        TaskInfo("arithmetic", "exact_match,number", local=True),
        TaskInfo("gsm8k", "exact_match,flexible-extract", local=False),
        TaskInfo("ifeval", "prompt_level_strict_acc,none", local=False),
        TaskInfo("mmlu_pro", "exact_match,custom-extract", local=False),
    )
}


def task_infos(names: Sequence[str]) -> list[TaskInfo]:
    """Tasks by name; raises ``AccuracyError`` on an unknown one, on none, and on one named twice."""
    if not names:
        raise AccuracyError(f"no tasks; {', '.join(TASKS)} are known")
    for name in names:
        if name not in TASKS:
            raise AccuracyError(f"no task {name!r}: {unknown_name_hint(name, TASKS)}")
    if len(set(names)) < len(names):
        raise AccuracyError(f"tasks {', '.join(names)}: one is named twice")
    return [TASKS[name] for name in names]


def definitions(info: TaskInfo) -> list[str]:
    """Folders where lm-eval finds a task's definition; reading all of its thousands would take seconds."""
    import lm_eval.tasks

    return [] if info.local else [str(Path(lm_eval.tasks.__file__).parent / info.name)]


def load_spec(info: TaskInfo) -> str | dict[str, Any]:
    """What lm-eval is given: a name of its own, or a whole configuration with the items in memory."""
    if not info.local:
        return info.name
    import yaml

    spec: dict[str, Any] = yaml.safe_load((_DATA / f"{info.name}.yaml").read_text())
    return {**spec, "custom_dataset": lambda **_: _items(info.name)}


def _items(name: str) -> Any:
    from datasets import Dataset

    lines = (_DATA / f"{name}.jsonl").read_text().splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
