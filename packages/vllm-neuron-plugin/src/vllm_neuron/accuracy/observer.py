# SPDX-License-Identifier: Apache-2.0
"""What looks into an engine's steps: a capture, replacements and snapshots, as far as the settings ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.logger import init_logger

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.errors import CaptureError
from neuron_core.errors import ConfigError, unknown_name_hint
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.compiled import Watch
from neuron_core.graphs.taps import Tap, TappedProgram, Taps
from vllm_neuron.accuracy.conventions import is_shared
from vllm_neuron.accuracy.recorder import Recorder
from vllm_neuron.accuracy.replacement import Replacement
from vllm_neuron.accuracy.snapshots import SnapshotTaker
from vllm_neuron.config import NeuronConfig
from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.requests import Request, RequestTable

__all__ = ["AccuracyObserver", "accuracy_observer"]

logger = init_logger(f"vllm.{__name__}")


class AccuracyObserver:
    """A `StepObserver` of one rank."""

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder | None,
        replacement: Replacement | None,
        snapshots: SnapshotTaker | None,
    ) -> None:
        self.recorder = recorder
        self.replacement = replacement
        self.snapshots = snapshots
        self._model = model
        self.taps = Taps(model, self._wants, self._may_put)
        self._called: set[str] = set()
        self._problem: str | None = None
        self._named = frozenset(name for name, _ in model.named_modules())

    def puts(
        self, program: TappedProgram, batch: Batch, values: Mapping[str, Tensor], table: RequestTable
    ) -> Mapping[str, Tensor]:
        """See `StepObserver`."""
        if self.replacement is None:
            return program.nothing_put()
        return self.replacement.puts(program, batch, values, table)

    def watch(self, program: TappedProgram, batch: Batch, values: Mapping[str, Tensor]) -> Watch | None:
        """See `StepObserver`."""
        if self.snapshots is None:
            return None
        watch = self.snapshots.watch(program.program, batch, values)
        if self.snapshots.problem is not None:
            self._problem = self.snapshots.problem
        return watch

    def ran(
        self,
        program: TappedProgram,
        batch: Batch,
        values: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        table: RequestTable,
    ) -> None:
        """See `StepObserver`."""
        if (recorder := self.recorder) is not None:
            self._write(lambda: recorder.ran(program, batch, values, outputs, table))

    def ended(self, table: RequestTable, requests: Sequence[Request], caches: Sequence[Tensor]) -> None:
        """See `StepObserver`."""
        if (recorder := self.recorder) is not None:
            self._write(lambda: recorder.ended(table, requests, caches))

    def preempted(self, request_ids: Sequence[str]) -> None:
        """See `StepObserver`."""
        if self.recorder is not None:
            self.recorder.preempted(request_ids)

    def close(self) -> str | None:
        """See `StepObserver`."""
        if self.recorder is not None:
            self.recorder.close()
        problem, self._problem = self._problem, None
        return problem

    def _write(self, work: Callable[[], None]) -> None:
        """Do what writes. If it cannot, the engine goes on serving, and :meth:`close` says why it wrote no more."""
        try:
            work()
        except CaptureError as error:
            logger.error("nothing is captured any more: %s", error)
            self._problem = str(error)
            if self.recorder is not None:
                self.recorder.close()

    def check(self) -> None:
        """Raise ``ConfigError`` for a pattern that none of the modules of the model's programs has matched."""
        asked = {
            "tensor_capture": self.recorder.spec.modules if self.recorder is not None else (),
            "tensor_replacement": self.replacement.modules if self.replacement is not None else (),
        }
        for setting, patterns in asked.items():
            for pattern in patterns:
                spec = CaptureSpec((pattern,))
                if not any(spec.wants_module(name) for name in self._called):
                    hint = f"matches no module that a step calls; {unknown_name_hint(pattern, self._called)}"
                    raise ConfigError(f"neuron_config.{setting}.modules", pattern, hint)

    def _wants(self, module: str, tensor: str) -> bool:
        if module not in self._named:  # a part's own, all of whose tensors are those of modules in it
            return False
        if is_shared(self._model, Tap(module, tensor)):
            return False
        self._called.add(module)
        spec = self.recorder.spec if self.recorder is not None else None
        return spec is not None and spec.wants_module(module) and spec.wants_tensor(tensor)

    def _may_put(self, module: str, tensor: str) -> bool:
        return self.replacement is not None and self.replacement.may_put(module, tensor)


def accuracy_observer(
    settings: NeuronConfig,
    model: nn.Module,
    config: VllmConfig,
    builder: GraphBuilder,
    *,
    rank: int,
    size: int,
) -> AccuracyObserver | None:
    """The observer that the settings ask for, or None; call its ``check`` once the programs are made."""
    if not settings.observes:
        return None
    recorder = replacement = snapshots = None
    if settings.tensor_capture is not None:
        recorder = Recorder(settings.tensor_capture, model, config, rank=rank, size=size)
    if settings.tensor_replacement is not None:
        replacement = Replacement(settings.tensor_replacement, model, rank=rank, size=size)
    if settings.input_snapshots is not None:
        snapshots = SnapshotTaker(settings.input_snapshots, builder, rank=rank)
    return AccuracyObserver(model, recorder, replacement, snapshots)
