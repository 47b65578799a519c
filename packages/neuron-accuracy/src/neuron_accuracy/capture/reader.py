# SPDX-License-Identifier: Apache-2.0
"""Reads a capture: lazily, and never a file that is not what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from neuron_accuracy.capture.codec import (
    cache_from_json,
    folder_name,
    name_of_folder,
    run_from_json,
    step_from_json,
    tensors_from_json,
)
from neuron_accuracy.capture.files import digest, elements, read_json
from neuron_accuracy.capture.order import merge_order
from neuron_accuracy.capture.records import CacheRecord, StepRecord
from neuron_accuracy.errors import CaptureError
from neuron_core.errors import NeuronError, unknown_name_hint

__all__ = ["Capture", "Stored"]

CHECK_BYTES = 8 * 2**20
"""Bytes read at a time where a digest is checked without loading the tensor."""

T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """What a file says of one tensor in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str

    @property
    def elements(self) -> int:
        """How many it has."""
        return prod(self.shape)


class Capture:
    """A capture on disk. Every method raises ``CaptureError`` naming the file that is missing, cut short, changed since
    it was written, or of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "capture.json"
        if not self.folder.is_dir():
            raise CaptureError(
                f"{folder} is no folder; give the folder of a capture, which holds capture.json"
            )
        self.run, self.spec = _parsed(path, read_json(path), run_from_json)
        self.replicas = tuple(
            sorted(_number(item, "dp") for item in self.folder.glob("dp*") if item.is_dir())
        )
        """Data-parallel replicas that wrote something."""
        self._steps = {dp: tuple(self._read_steps(dp)) for dp in self.replicas}
        self._described = lru_cache(maxsize=4096)(self._read_described)
        self._ranks = lru_cache(maxsize=4096)(_ranks_in)
        self._modules: tuple[str, ...] | None = None
        self._held: dict[tuple[int, int], frozenset[str]] = {}
        self._sets: dict[frozenset[str], frozenset[str]] = {}

    def steps(self, dp: int = 0) -> tuple[StepRecord, ...]:
        """The steps of one replica, in order."""
        return self._steps.get(dp, ())

    @property
    def requests(self) -> tuple[str, ...]:
        """Ids of all requests of all steps, in the order they were first seen."""
        seen = dict.fromkeys(
            row.request for dp in self.replicas for step in self.steps(dp) for row in step.rows
        )
        return tuple(seen)

    def modules(self) -> tuple[str, ...]:
        """Names of all modules, in the order they ran."""
        if self._modules is None:
            self._modules = merge_order(self._runs())
        return self._modules

    def modules_of(self, step: StepRecord, dp: int = 0) -> frozenset[str]:
        """Names of the modules that a step holds."""
        key = (dp, step.number)
        if key not in self._held:
            folders = (item.name for item in self._step(step, dp).iterdir() if item.is_dir())
            names = frozenset(map(name_of_folder, folders))
            # Most steps hold the same: one set for all of them.
            self._held[key] = self._sets.setdefault(names, names)
        return self._held[key]

    def first_step(self, module: str) -> tuple[int, StepRecord]:
        """The replica and the step that held a module first; raises ``CaptureError`` if none did."""
        for dp in self.replicas:
            for step in self.steps(dp):
                if module in self.modules_of(step, dp):
                    return dp, step
        raise CaptureError(
            f"{self.folder} has no module {module!r}: {unknown_name_hint(module, self.modules())}"
        )

    def ranks(self, module: str, step: StepRecord, dp: int = 0) -> tuple[int, ...]:
        """Ranks that wrote a module's tensors in a step."""
        return self._ranks(self._module(module, step, dp))

    def tensors(self, module: str, step: StepRecord, rank: int = 0, dp: int = 0) -> dict[str, Stored]:
        """What a rank holds of a module in a step, by tensor name."""
        return self._described(self._module(module, step, dp) / f"rank{rank}.json")[1]

    def load(
        self,
        module: str,
        tensor: str,
        step: StepRecord,
        rank: int = 0,
        *,
        dp: int = 0,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """A tensor as the rank held it, on the CPU, its digest checked; or rows ``begin`` to ``end`` of it, read alone
        and not checked: :meth:`check` does that without holding it all.
        """
        return self._load(self._module(module, step, dp) / f"rank{rank}.json", tensor, rows)

    def check(self, module: str, tensor: str, step: StepRecord, rank: int = 0, *, dp: int = 0) -> None:
        """Check the digest of a tensor a few megabytes at a time."""
        path = self._module(module, step, dp) / f"rank{rank}.json"
        stored = self._stored(path, tensor)
        row_bytes = max(1, stored.dtype.itemsize * prod(stored.shape[1:]))
        count, total = max(1, CHECK_BYTES // row_bytes), stored.shape[0] if stored.shape else 0
        running = hashlib.sha256()
        for begin in range(0, total, count):
            part = self._load(path, tensor, (begin, min(begin + count, total)))
            running.update(elements(part))
        if stored.shape and running.hexdigest() != stored.sha256:
            raise _changed(path, tensor)

    def caches(self, dp: int = 0) -> tuple[CacheRecord, ...]:
        """The KV caches that were taken, by request id."""
        folders = sorted((self.folder / f"dp{dp}" / "kv").glob("*/"))
        return tuple(
            _parsed(item / "kv.json", read_json(item / "kv.json"), cache_from_json) for item in folders
        )

    def load_pages(self, request: str, layer: int, rank: int = 0, *, dp: int = 0) -> dict[str, torch.Tensor]:
        """A rank's ``pages`` of one layer of a request's cache, and ``k_scale`` and ``v_scale`` of an 8-bit cache."""
        folder = self.folder / f"dp{dp}" / "kv" / folder_name(request) / f"layer.{layer}"
        path = folder / f"rank{rank}.json"
        return {name: self._load(path, name, None) for name in self._described(path)[1]}

    def cache_ranks(self, request: str, layer: int, *, dp: int = 0) -> tuple[int, ...]:
        """Ranks that wrote a layer of a request's cache."""
        return self._ranks(self.folder / f"dp{dp}" / "kv" / folder_name(request) / f"layer.{layer}")

    def _read_steps(self, dp: int) -> Iterator[StepRecord]:
        folders = [
            item for item in (self.folder / f"dp{dp}").iterdir() if item.is_dir() and item.name != "kv"
        ]
        steps = [
            _parsed(item / "step.json", read_json(item / "step.json"), step_from_json) for item in folders
        ]
        for item, step in zip(folders, steps, strict=True):
            if item.name != step.folder:
                raise CaptureError(f"{item / 'step.json'} is of step {step.folder}, not of {item.name}")
        yield from sorted(steps, key=lambda step: step.number)

    def _runs(self) -> Iterator[list[str]]:
        """The modules of each step in the order they ran, where a step has one not met before."""
        known: set[str] = set()
        for dp in self.replicas:
            for step in self.steps(dp):
                here = self.modules_of(step, dp)
                if here <= known:
                    continue
                known |= here
                yield sorted(here, key=lambda name: self._order(name, step, dp))

    def _order(self, module: str, step: StepRecord, dp: int) -> tuple[int, str]:
        ranks = self.ranks(module, step, dp)
        if not ranks:
            raise CaptureError(
                f"{self._module(module, step, dp)} holds no rank's tensors: the capture ended early"
            )
        return self._described(self._module(module, step, dp) / f"rank{ranks[0]}.json")[0], module

    def _step(self, step: StepRecord, dp: int) -> Path:
        return self.folder / f"dp{dp}" / step.folder

    def _module(self, module: str, step: StepRecord, dp: int) -> Path:
        return self._step(step, dp) / folder_name(module)

    def _read_described(self, path: Path) -> tuple[int, dict[str, Stored]]:
        def parse(data: dict[str, Any]) -> tuple[int, dict[str, Stored]]:
            order, tensors = tensors_from_json(data)
            return order, {name: Stored(item[0], _dtype(item[1]), item[2]) for name, item in tensors.items()}

        return _parsed(path, read_json(path), parse)

    def _stored(self, path: Path, tensor: str) -> Stored:
        held = self._described(path)[1]
        if tensor not in held:
            raise CaptureError(f"{path} has no tensor {tensor!r}: {unknown_name_hint(tensor, held)}")
        return held[tensor]

    def _load(self, path: Path, tensor: str, rows: tuple[int, int] | None) -> torch.Tensor:
        stored, file = self._stored(path, tensor), path.with_suffix(".safetensors")
        try:
            # Opened anew each time, and copied: the file is mapped, and pages once touched stay until it is closed.
            with safe_open(file, framework="pt") as opened:
                if rows is None:
                    part: torch.Tensor = opened.get_tensor(tensor).clone()
                else:
                    part = opened.get_slice(tensor)[rows[0] : rows[1]].clone()
        except FileNotFoundError as error:
            raise CaptureError(
                f"{file} is missing: the capture ended early, or a part was removed"
            ) from error
        except (SafetensorError, OSError) as error:
            raise CaptureError(f"{file} cannot be read: {error}; it is damaged, or cut short") from error
        shape = stored.shape if rows is None else (rows[1] - rows[0], *stored.shape[1:])
        if tuple(part.shape) != shape or part.dtype != stored.dtype:
            raise CaptureError(
                f"{file}: {tensor} is {part.dtype} {list(part.shape)}, but {path.name} says "
                f"{stored.dtype} {list(shape)}"
            )
        if rows is None and digest(part) != stored.sha256:
            raise _changed(path, tensor)
        return part


def _changed(path: Path, tensor: str) -> CaptureError:
    file = path.with_suffix(".safetensors")
    return CaptureError(f"{file}: {tensor} is not what was written: its digest is not the one in {path.name}")


def _parsed(path: Path, data: dict[str, Any], parse: Callable[[dict[str, Any]], T]) -> T:
    try:
        return parse(data)
    except (KeyError, TypeError, ValueError, AttributeError, NeuronError) as error:
        raise CaptureError(f"{path} is damaged: {error!r}") from error


def _number(path: Path, prefix: str) -> int:
    digits = path.stem.removeprefix(prefix)
    if not digits.isdecimal():
        raise CaptureError(f"{path} is no part of a capture; remove it")
    return int(digits)


def _ranks_in(folder: Path) -> tuple[int, ...]:
    return tuple(sorted(_number(path, "rank") for path in folder.glob("rank*.json")))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return dtype
