# SPDX-License-Identifier: Apache-2.0
"""The records of a capture as JSON, and folder names for modules and requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from neuron_accuracy.capture.records import FORMAT, CacheRecord, RunRecord, StepRecord, StepRow, check_rows
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
    "tensors_from_json",
]

T = TypeVar("T")


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
    """What ``capture.json`` said; raises ``KeyError``, ``TypeError``, ``ValueError`` or a ``NeuronError``."""
    info = _typed(SubjectInfo, {**data["info"], "abilities": frozenset(data["info"]["abilities"])})
    layouts = {str(name): _layout(item) for name, item in data["layouts"].items()}
    run = _typed(
        RunRecord, {**{name: data[name] for name in ("ranks", "names")}, "info": info, "layouts": layouts}
    )
    if run.ranks < 1:
        raise ValueError(f"ranks is {run.ranks}, not at least 1")
    return run, CaptureSpec.from_json("spec", data["spec"])


def record_to_json(record: StepRecord | CacheRecord) -> dict[str, Any]:
    """What ``step.json`` or ``kv.json`` holds."""
    return {"format": FORMAT, **asdict(record)}


def step_from_json(data: Mapping[str, Any]) -> StepRecord:
    """What ``step.json`` said; raises ``KeyError``, ``TypeError``, ``ValueError`` or ``CaptureError``."""
    rows = tuple(_typed(StepRow, row) for row in data["rows"])
    step = _typed(StepRecord, {**_fields(data), "rows": rows})
    check_rows(step)
    return step


def cache_from_json(data: Mapping[str, Any]) -> CacheRecord:
    """What ``kv.json`` said; raises ``KeyError``, ``TypeError`` or ``ValueError``."""
    return _typed(CacheRecord, _fields(data))


def tensors_from_json(data: Mapping[str, Any]) -> tuple[int, dict[str, tuple[tuple[int, ...], str, str]]]:
    """What ``rank<r>.json`` said: the module's place in its step, and by tensor its shape, dtype and digest; raises
    ``KeyError``, ``TypeError`` or ``ValueError``.
    """
    found = {}
    for name, item in data["tensors"].items():
        shape = _checked("tuple[int, ...]", "shape", item["shape"])
        found[name] = (
            shape,
            _checked("str", "dtype", item["dtype"]),
            _checked("str", "sha256", item["sha256"]),
        )
    return _checked("int", "order", data["order"]), found


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "format"}


def _layout(data: Mapping[str, Any]) -> TensorLayout:
    heads = data["heads"]
    return TensorLayout.from_json(
        {**data, "heads": None if heads is None else _checked("int", "heads", heads)}
    )


def _typed(cls: type[T], data: Mapping[str, Any]) -> T:
    """A record of plain values, of which JSON has lists for tuples; raises ``TypeError`` naming one of another type."""
    kinds = {item.name: str(item.type) for item in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: _checked(kinds.get(name, ""), name, value) for name, value in data.items()})


def _checked(kind: str, name: str, value: Any) -> Any:
    if kind not in _KINDS:
        return value
    container, item = _KINDS[kind]
    inside = [value] if container is None else value.values() if isinstance(value, dict) else value
    held = container is None or isinstance(value, container)
    # Not isinstance: true is no number in JSON.
    if not held or any(type(one) is not item for one in inside):
        raise TypeError(f"{name} is {value!r}, not {kind}")
    return tuple(value) if container is list else value


_KINDS: Mapping[str, tuple[type | None, type]] = {
    "int": (None, int),
    "str": (None, str),
    "tuple[int, ...]": (list, int),
    "tuple[bool, ...]": (list, bool),
    "Mapping[str, int]": (dict, int),
    "Mapping[str, str]": (dict, str),
}
"""Of a field's type: what holds the items, and their type."""
