# SPDX-License-Identifier: Apache-2.0
"""One run of lm-eval: scores by task and metric, and every sample."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.subjects.protocol import Subject
from neuron_accuracy.tasks.catalog import TASKS, TaskInfo, definitions, load_spec
from neuron_core.errors import NeuronError

__all__ = ["Sample", "Scored", "TaskScores", "evaluate", "local_completions", "needs_lm_eval"]


@dataclass(frozen=True)
class Scored:
    """A metric's value and its standard error, which is NaN if lm-eval knows none."""

    value: float
    stderr: float


@dataclass(frozen=True)
class Sample:
    """One item of a task."""

    place: str
    """``task/number``; a group's samples name the task they are of."""
    prompt: str
    target: str
    answer: str
    right: bool


@dataclass(frozen=True)
class TaskScores:
    """One task."""

    name: str
    metrics: Mapping[str, Scored]
    samples: Sequence[Sample]
    seconds: float


def needs_lm_eval() -> None:
    """Raise ``AccuracyError`` unless lm-eval is installed."""
    try:
        import lm_eval  # noqa: F401 -- whether it can be
    except ImportError as error:
        raise AccuracyError(f"tasks need lm-eval: pip install 'neuron-accuracy[tasks]' ({error})") from error


def local_completions(
    url: str, model: str, tokenizer: str = "", authorization: str = "", concurrent: int = 8
) -> Any:
    """lm-eval's own client of a running server, in the place of a subject; ``url`` ends in ``/v1``.

    ``tokenizer`` is a folder, for a server without a tokenizer's endpoints. ``authorization`` is the header of
    that name; without it lm-eval reads a key from ``OPENAI_API_KEY``.
    """
    needs_lm_eval()
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    how: dict[str, Any] = {"tokenizer_backend": "huggingface", "tokenizer": tokenizer} if tokenizer else {}
    if authorization:
        kind, _, key = authorization.partition(" ")
        how["header"] = {"Authorization": authorization}
        how["auth_token"] = key if kind == "Bearer" else None  # of the tokenizer's endpoints
    return LocalCompletionsAPI(
        model=model, base_url=f"{url.rstrip('/')}/completions", num_concurrent=concurrent, **how
    )


def evaluate(
    subject: Subject | Any,
    tasks: Sequence[TaskInfo],
    *,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[TaskScores]:
    """Run tasks on a subject, or on a model of lm-eval such as :func:`local_completions` makes.

    ``limit`` takes the first items of each task only. Raises ``AccuracyError`` if a task's items cannot be had, or its
    primary metric is not among the results.
    """
    needs_lm_eval()
    from lm_eval.api.model import LM

    from neuron_accuracy.tasks.model import SubjectLM

    if limit is not None and limit < 1:
        raise AccuracyError(f"limit={limit}: must be at least 1")
    model = subject if isinstance(subject, LM) else SubjectLM(subject, progress=progress)
    return [_evaluated(model, info, limit) for info in tasks]


def _evaluated(model: Any, info: TaskInfo, limit: int | None) -> TaskScores:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    begin = time.monotonic()
    try:
        results = simple_evaluate(
            model,
            tasks=[load_spec(info)],
            limit=limit,
            bootstrap_iters=1000,
            task_manager=TaskManager(include_defaults=False, include_path=definitions(info)),
        )
    except NeuronError:
        raise
    except Exception as error:
        # lm-eval and datasets raise all sorts; what they said is kept.
        raise AccuracyError(_cannot(info, error)) from error
    seconds = time.monotonic() - begin
    if not results:
        raise AccuracyError(f"task {info.name}: lm-eval gave no results")
    return TaskScores(info.name, _metrics(results, info), _samples(results, info), seconds)


def _cannot(info: TaskInfo, error: Exception) -> str:
    said = f"{type(error).__name__}: {error}"[:400]
    if info.local:
        return f"task {info.name}: {said}"
    local = ", ".join(name for name, other in TASKS.items() if other.local)
    return (
        f"task {info.name}: its items, or a package it needs, cannot be had from here ({said}); with a hub that can be "
        f"reached, or its dataset in the hub's cache, it works; {local} need none"
    )


def _metrics(results: Mapping[str, Any], info: TaskInfo) -> dict[str, Scored]:
    row = results["results"].get(info.name, {})
    metrics: dict[str, Scored] = {}
    for name, value in row.items():
        metric, comma, filtered = name.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            stderr = row.get(f"{metric}_stderr,{filtered}")
            known = isinstance(stderr, int | float)
            metrics[name] = Scored(float(value), float(stderr) if known else float("nan"))
    if info.primary not in metrics:
        raise AccuracyError(f"task {info.name}: lm-eval gave no {info.primary}, only {sorted(metrics)}")
    return metrics


def _samples(results: Mapping[str, Any], info: TaskInfo) -> list[Sample]:
    metric, _, filtered = info.primary.partition(",")
    taken: list[Sample] = []
    for task, samples in results["samples"].items():
        for sample in samples:
            if sample["filter"] != filtered:
                continue
            taken.append(
                Sample(
                    place=f"{task}/{sample['doc_id']}",
                    prompt=str(sample["arguments"][0][0]),
                    target=_target(sample),
                    answer=_answer(sample, metric),
                    right=float(sample[metric]) >= 1.0,
                )
            )
    if not taken:
        raise AccuracyError(f"task {info.name}: lm-eval gave no samples of {info.primary}")
    return taken


def _target(sample: Mapping[str, Any]) -> str:
    target = sample["target"]
    choices = [arguments[1] for arguments in sample["arguments"]]
    return str(choices[target]) if isinstance(target, int) and len(choices) > 1 else str(target)


def _answer(sample: Mapping[str, Any], metric: str) -> str:
    """What a generation was after its filter, or the likeliest of choices, per letter if the metric says so."""
    answers = sample["filtered_resps"]
    if len(answers) == 1:
        return str(answers[0])
    texts = [str(arguments[1]) for arguments in sample["arguments"]]
    letters = [len(text.strip()) if metric == "acc_norm" else 1 for text in texts]
    values = [float(answer[0]) / count for answer, count in zip(answers, letters, strict=True)]
    return texts[values.index(max(values))]
