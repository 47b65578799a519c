# SPDX-License-Identifier: Apache-2.0
"""Writes one rank's part of a capture. What is on disk where: :mod:`neuron_accuracy.capture.records`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from neuron_accuracy.capture.codec import folder_name, record_to_json, run_to_json
from neuron_accuracy.capture.files import size_bytes, write_json, write_tensors
from neuron_accuracy.capture.records import CacheRecord, RunRecord, StepRecord, check_rows
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.errors import CaptureError

__all__ = ["CaptureWriter"]


class CaptureWriter:
    """One rank's writer; every rank of a run has one, over the same folder.

    Rank 0 also writes what the run and its steps are, whether or not ``spec`` takes its tensors. Raises
    ``CaptureError`` if the folder already holds this rank's part of a capture.
    """

    def __init__(
        self, folder: Path, spec: CaptureSpec, run: RunRecord, *, rank: int = 0, dp: int = 0
    ) -> None:
        if not 0 <= rank < run.ranks:
            raise CaptureError(f"rank {rank} is none of the run's {run.ranks}; 0 to {run.ranks - 1} are")
        self.folder = folder
        self.spec = spec
        self.run = run
        self.rank = rank
        self._replica = folder / f"dp{dp}"
        self._written = 0
        self._steps: set[int] = set()
        self._closed = False
        self._refuse_another()
        if rank == 0:
            write_json(folder / "capture.json", run_to_json(run, spec))

    @property
    def written_bytes(self) -> int:
        """Bytes of the tensors written so far."""
        return self._written

    def wants(self, step: StepRecord) -> bool:
        """Whether anything of this step would be written by this rank."""
        requests = tuple(row.request for row in step.rows)
        return self.spec.wants_step(step.phase, step.number, requests)

    def write_step(self, step: StepRecord, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """Write what the spec takes of one step's tensors, by module and tensor name in the order they were computed.

        Tensors are written as they are, any dtype and device; rows of requests that the spec does not take stay in
        them, but ``step.json`` does not say whose they are. Raises ``CaptureError`` before anything is written if the
        step was written already, its rows do not fit it, or ``max_bytes`` would be exceeded.
        """
        self._check_open()
        if not self.wants(step):
            return
        check_rows(step)
        if step.number in self._steps:
            raise CaptureError(
                f"step {step.number} was written already; steps are numbered from 0, each once"
            )
        taken = self._taken(tensors)
        self._reserve(size_bytes(taken), f"step {step.number}")
        self._steps.add(step.number)
        folder = self._replica / step.folder
        modules: dict[str, dict[str, Tensor]] = {}
        for (module, name), tensor in taken.items():
            modules.setdefault(module, {})[name] = tensor
        for order, (module, held) in enumerate(modules.items()):
            write_tensors(folder / folder_name(module), self.rank, held, order)
        if self.rank == 0:
            rows = tuple(row for row in step.rows if self.spec.wants_request(row.request))
            write_json(folder / "step.json", record_to_json(replace(step, rows=rows)))

    def write_cache(
        self,
        cache: CacheRecord,
        pages: Sequence[Tensor],
        scales: Sequence[tuple[Tensor, Tensor] | None] | None = None,
    ) -> None:
        """Write one request's cache if the spec takes it: a tensor of ``pages`` per layer as :class:`CacheRecord` says,
        and per layer of an 8-bit cache the scales of its keys and of its values.
        """
        self._check_open()
        if not self.spec.kv or not self.spec.wants_request(cache.request):
            return
        each = [None] * cache.num_layers if scales is None else list(scales)
        _check_pages(cache, pages, each)
        folder = self._replica / "kv" / folder_name(cache.request)
        if (folder / "layer.0" / f"rank{self.rank}.json").exists():
            raise CaptureError(f"the cache of request {cache.request!r} was written already")
        layers = [_cache_tensors(page, pair) for page, pair in zip(pages, each, strict=True)]
        if self.spec.wants_rank(self.rank):
            self._reserve(sum(map(size_bytes, layers)), f"the cache of request {cache.request!r}")
            for index, held in enumerate(layers):
                write_tensors(folder / f"layer.{index}", self.rank, held, index)
        if self.rank == 0:
            write_json(folder / "kv.json", record_to_json(cache))

    def close(self) -> None:
        """End it; what was written stays, and nothing more can be."""
        self._closed = True

    def _taken(self, tensors: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
        if not self.spec.wants_rank(self.rank):
            return {}
        return {
            (module, name): tensor
            for (module, name), tensor in tensors.items()
            if self.spec.wants_module(module) and self.spec.wants_tensor(name)
        }

    def _reserve(self, size: int, what: str) -> None:
        total = self._written + size
        if total > self.spec.max_bytes:
            raise CaptureError(
                f"{what} would bring the capture of rank {self.rank} to {total} bytes, beyond "
                f"max_bytes={self.spec.max_bytes}; narrow modules, tensors, phases, steps, requests or ranks, "
                f"or allow max_bytes={total} and more"
            )
        self._written = total

    def _check_open(self) -> None:
        if self._closed:
            raise CaptureError(f"the capture in {self.folder} is closed")

    def _refuse_another(self) -> None:
        own = (
            f"*/*/rank{self.rank}.*",
            f"kv/*/*/rank{self.rank}.*",
            *(("*/step.json",) if self.rank == 0 else ()),
        )
        held = next((path for pattern in own for path in self._replica.glob(pattern)), None)
        described = self.folder / "capture.json"
        if held is None and self.rank == 0 and self._replica.name == "dp0" and described.exists():
            held = described
        if held is not None:
            raise CaptureError(f"{held}: the folder holds a capture already; give an empty one, or remove it")


def _check_pages(
    cache: CacheRecord, pages: Sequence[Tensor], scales: Sequence[tuple[Tensor, Tensor] | None]
) -> None:
    if len(pages) != cache.num_layers or len(scales) != cache.num_layers:
        raise CaptureError(
            f"request {cache.request!r}: pages of {len(pages)} layers and scales of {len(scales)}, "
            f"but the record says {cache.num_layers} layers"
        )
    for index, page in enumerate(pages):
        ends = (cache.block_size, 2 * cache.head_dim)
        if page.dim() != 4 or page.shape[0] != len(cache.block_ids) or tuple(page.shape[2:]) != ends:
            raise CaptureError(
                f"request {cache.request!r}: the pages of layer {index} are {list(page.shape)}, not "
                f"[{len(cache.block_ids)}, local heads, {cache.block_size}, {2 * cache.head_dim}]"
            )


def _cache_tensors(page: Tensor, scales: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    if scales is None:
        return {"pages": page}
    k_scale, v_scale = (torch.as_tensor(scale) for scale in scales)
    return {"pages": page, "k_scale": k_scale, "v_scale": v_scale}
