# SPDX-License-Identifier: Apache-2.0
"""Writes what an engine's steps compute as a capture of neuron-accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from vllm.config import VllmConfig

from neuron_accuracy.capture.records import CacheRecord, RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_core.graphs.taps import TappedProgram
from neuron_models.attention import PagedAttention
from vllm_neuron.accuracy.conventions import as_rows, layouts, names
from vllm_neuron.accuracy.identity import subject_info
from vllm_neuron.accuracy.settings import CaptureSettings
from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.requests import Request, RequestTable

__all__ = ["Recorder"]


class Recorder:
    """One rank's part of a capture. Steps are numbered from the first after the engine is ready."""

    def __init__(
        self, settings: CaptureSettings, model: nn.Module, vllm_config: VllmConfig, *, rank: int, size: int
    ) -> None:
        self.spec = settings.spec
        self._model = model
        self._attentions = [module for module in model.modules() if isinstance(module, PagedAttention)]
        self._run = RunRecord(subject_info(vllm_config), size, layouts(model, size), names(model))
        self._rank, self._size = rank, size
        self._writer = self._write_to(settings.folder)
        self._ended = False
        self._count = 0
        self._computed: dict[str, tuple[int, int]] = {}

    def begin(self, folder: Path) -> None:
        """End the capture and begin another; requests that run go on in it as new ones."""
        self.close()
        self._writer, self._count, self._ended = self._write_to(folder), 0, False

    def _write_to(self, folder: Path) -> CaptureWriter:
        return CaptureWriter(folder, self.spec, self._run, rank=self._rank)

    def ran(
        self,
        program: TappedProgram,
        batch: Batch,
        values: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        table: RequestTable,
    ) -> None:
        """Write one step."""
        rows = self._rows(batch, values, table)
        bucket = batch.bucket
        record = StepRecord(
            self._count, bucket.name, str(bucket.phase), bucket.num_tokens, bucket.num_seqs, rows
        )
        self._count += 1
        for row in rows:
            begun, _ = self._computed.get(row.request, (row.positions[0], 0))
            self._computed[row.request] = (begun, row.positions[-1] + 1)
        if not self._ended and self._writer.wants(record):
            taken = {
                (tap.module, tap.tensor): as_rows(self._model, tap, outputs[tap.value])
                for tap in program.taps
            }
            self._writer.write_step(record, taken)

    def _rows(self, batch: Batch, values: Mapping[str, Tensor], table: RequestTable) -> tuple[StepRow, ...]:
        ids, positions = values["token_ids"].tolist(), values["positions"].tolist()
        rows = []
        for row, request in enumerate(batch.requests):
            begin, end = int(batch.starts[row]), int(batch.starts[row + 1])
            name = request.request_id
            cached: tuple[int, ...] = ()
            if name not in self._computed:
                cached = tuple(table.token_ids[request.row, : positions[begin]].tolist())
            rows.append(StepRow(name, begin, row, tuple(positions[begin:end]), tuple(ids[begin:end]), cached))
        return tuple(rows)

    def ended(self, table: RequestTable, requests: Sequence[Request], caches: Sequence[Tensor]) -> None:
        """Write the caches of requests that end."""
        for request in requests:
            begun, computed = self._computed.pop(request.request_id, (0, 0))
            if self.spec.kv and not self._ended and computed and self.spec.wants_request(request.request_id):
                self._write_cache(table, request, begun, computed, caches)

    def preempted(self, request_ids: Sequence[str]) -> None:
        """Forget what was computed."""
        for request_id in request_ids:
            self._computed.pop(request_id, None)

    def close(self) -> None:
        """End the capture; what comes later is not written."""
        if not self._ended:
            self._writer.close()
        self._ended = True

    def _write_cache(
        self, table: RequestTable, request: Request, begun: int, computed: int, caches: Sequence[Tensor]
    ) -> None:
        count = -(-computed // table.block_size)
        block_ids = table.block_tables[request.row, :count]
        attention = self._attentions[0]
        record = CacheRecord(
            request.request_id,
            tuple(table.token_ids[request.row, :computed].tolist()),
            begun,
            table.block_size,
            tuple(block_ids.tolist()),
            (False,) * count,
            len(caches),
            attention.num_kv_heads,
            attention.head_dim,
            replicas=max(1, self._size // attention.num_kv_heads),
        )
        scales = [
            None if module.k_scale is None or module.v_scale is None else (module.k_scale, module.v_scale)
            for module in self._attentions
        ]
        pages = [cache[block_ids.astype(np.int64)] for cache in caches]
        self._writer.write_cache(record, pages, scales)
