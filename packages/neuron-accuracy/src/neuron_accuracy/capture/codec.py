# SPDX-License-Identifier: Apache-2.0
"""The records of a capture as JSON, and folder names for modules and requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import quote, unquote

from neuron_accuracy.capture.records import FORMAT, CacheRecord, RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.layout import TensorLayout
from neuron_accuracy.subjects.info import SubjectInfo

__all__ = [
    "cache_from_json",
    "folder_name",
    "name_of_folder",
    "record_to_json",
    "run_from_json",
    "run_to_json",
    "step_from_json",
]


def folder_name(name: str) -> str:
    """A folder's name for a module or a request, whatever characters its name has."""
    quoted = quote(name, safe="()[]+=@,:")
    return quoted.replace(".", "%2E") if set(quoted) <= {"."} else quoted


def name_of_folder(folder: str) -> str:
    """The name that :func:`folder_name` was given."""
    return unquote(folder)


def run_to_json(run: RunRecord, spec: CaptureSpec) -> dict[str, Any]:
    """What ``capture.json`` holds."""
    info = {**asdict(run.info), "abilities": sorted(run.info.abilities)}
    layouts = {name: layout.to_json() for name, layout in run.layouts.items()}
    return {
        "format": FORMAT,
        "info": info,
        "ranks": run.ranks,
        "layouts": layouts,
        "names": dict(run.names),
        "spec": spec.to_json(),
    }


def run_from_json(data: Mapping[str, Any]) -> tuple[RunRecord, CaptureSpec]:
    """What ``capture.json`` said; raises ``KeyError``, ``TypeError``, ``ValueError`` or ``LayoutError``."""
    info = SubjectInfo(**{**data["info"], "abilities": frozenset(data["info"]["abilities"])})
    layouts = {str(name): TensorLayout.from_json(item) for name, item in data["layouts"].items()}
    run = RunRecord(info, int(data["ranks"]), layouts, dict(data["names"]))
    return run, CaptureSpec.from_json("spec", data["spec"])


def record_to_json(record: StepRecord | CacheRecord) -> dict[str, Any]:
    """What ``step.json`` or ``kv.json`` holds."""
    return {"format": FORMAT, **asdict(record)}


def step_from_json(data: Mapping[str, Any]) -> StepRecord:
    """What ``step.json`` said; raises ``KeyError``, ``TypeError`` or ``ValueError``."""
    rows = tuple(
        StepRow(
            **{
                **row,
                **{
                    name: tuple(row[name]) for name in ("positions", "token_ids", "cached_ids") if name in row
                },
            },
        )
        for row in data["rows"]
    )
    return StepRecord(**{**_fields(data), "rows": rows})


def cache_from_json(data: Mapping[str, Any]) -> CacheRecord:
    """What ``kv.json`` said; raises ``KeyError``, ``TypeError`` or ``ValueError``."""
    lists = {name: tuple(data[name]) for name in ("token_ids", "block_ids", "freed")}
    return CacheRecord(**{**_fields(data), **lists})


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "format"}
