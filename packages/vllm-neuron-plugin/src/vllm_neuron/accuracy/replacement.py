# SPDX-License-Identifier: Apache-2.0
"""Rows of another run's capture in the place of what modules give, chosen while the engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.layout import Rows, TensorLayout
from neuron_accuracy.replace.parts import part_of
from neuron_accuracy.replace.source import ReferenceRows, whole_rows
from neuron_core.errors import ConfigError, unknown_name_hint
from neuron_core.graphs.program import TensorSpec
from neuron_core.graphs.taps import Tap, TappedProgram
from neuron_models.rope import RotaryTable
from vllm_neuron.accuracy.conventions import layouts, names
from vllm_neuron.accuracy.settings import ReplacementSettings
from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.requests import RequestTable

__all__ = ["Replacement"]


class Replacement:
    """What one rank may be given. Nothing is until :meth:`choose` names modules."""

    def __init__(self, settings: ReplacementSettings, model: nn.Module, *, rank: int, size: int) -> None:
        self.source = ReferenceRows(settings.folder)
        self.modules = settings.modules
        self._spec = CaptureSpec(settings.modules)
        self._model = model
        self._layouts = layouts(model, size)
        self._names = names(model)
        self._rank, self._size = rank, size
        self._chosen: frozenset[str] = frozenset()
        self._known: dict[str, None] = {}

    def may_put(self, module: str, tensor: str) -> bool:
        """Whether a module's output may be replaced: it is named, and the capture has it."""
        if not tensor.startswith("output.") or not self._spec.wants_module(module):
            return False
        name = f"{module}:{tensor}"
        needed = self._slices(name).values() or (self._names.get(name, name),)
        if not all(self.source.knows(item) for item in needed):
            return False
        self._known[module] = None
        return True

    @property
    def candidates(self) -> list[str]:
        """Modules that can be replaced, in the order they run."""
        return list(self._known)

    def choose(self, modules: Sequence[str]) -> None:
        """Replace these modules' outputs, and no others, from the next step on; raises ``ConfigError`` for others."""
        for module in modules:
            if module not in self._known:
                hint = unknown_name_hint(module, self._known)
                raise ConfigError("modules", module, f"cannot be replaced here; {hint}")
        self._chosen = frozenset(modules)

    def puts(
        self, program: TappedProgram, batch: Batch, values: Mapping[str, Tensor], table: RequestTable
    ) -> dict[str, Tensor]:
        """Every input that the puts of ``program`` add."""
        given = program.nothing_put()
        for tap, spec in program.puts.items():
            if tap.module in self._chosen:
                value, rows = self._rows(tap, spec, batch, values, table)
                given[tap.put], given[tap.put_rows] = value, rows
        return given

    def _rows(
        self, tap: Tap, spec: TensorSpec, batch: Batch, values: Mapping[str, Tensor], table: RequestTable
    ) -> tuple[Tensor, Tensor]:
        name = f"{tap.module}:{tap.tensor}"
        layout = self._layouts.get(f"{name}@{batch.bucket.phase}", self._layouts.get(name, TensorLayout()))
        by_request = layout.rows is Rows.REQUESTS
        count = batch.bucket.num_seqs if by_request else batch.bucket.num_tokens
        found: dict[int, Tensor] = {}
        positions, ids = values["positions"].tolist(), values["token_ids"].tolist()
        for row, request in enumerate(batch.requests):
            begin, end = int(batch.starts[row]), int(batch.starts[row + 1])
            places = range(end - 1, end) if by_request else range(begin, end)
            tokens = table.token_ids[request.row].tolist()
            tokens[positions[begin] : positions[end - 1] + 1] = ids[
                begin:end
            ]  # the host may not have read them yet
            asked = [positions[place] for place in places]
            rows = whole_rows(
                self.source,
                self._names.get(name, name),
                self._slices(name),
                self._declared(name),
                tokens,
                asked,
            )
            for place, held in zip(places, rows, strict=True):
                if held is not None:
                    found[row if by_request else place] = held
        return self._local(tap, spec, layout, count, found)

    def _local(
        self, tap: Tap, spec: TensorSpec, layout: TensorLayout, count: int, found: Mapping[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of the rows, as the module gives them, and which of them are given."""
        if not found:
            return spec.empty("cpu").zero_(), torch.zeros(spec.shape[0], dtype=torch.int32)
        width = len(next(iter(found.values())))
        whole = torch.zeros(count, width, dtype=spec.dtype)
        chosen = torch.zeros(count, dtype=torch.int32)
        for row, held in found.items():
            whole[row], chosen[row] = held.to(spec.dtype), 1
        if self._is_table(tap):
            whole = whole[:, : width // 2].contiguous()
        local = part_of(whole, layout, self._rank, self._size)
        if layout.dim == 0:
            chosen = part_of(chosen, layout, self._rank, self._size)
        return local.reshape(spec.shape).contiguous(), chosen.contiguous()

    def _declared(self, name: str) -> TensorLayout:
        return self._layouts.get(name, TensorLayout())

    def _slices(self, name: str) -> dict[str, str]:
        """The names under which the slices of a fused tensor are compared; empty if it is compared whole."""
        parts = {part.name: f"{name}:{part.name}" for part in self._declared(name).slices}
        return {part: self._names[key] for part, key in parts.items() if key in self._names}

    def _is_table(self, tap: Tap) -> bool:
        return isinstance(dict(self._model.named_modules()).get(tap.module), RotaryTable)
