# SPDX-License-Identifier: Apache-2.0
"""Captures the modules of any eager torch model, such as one of transformers, by forward hooks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from neuron_accuracy.capture.batches import Batch, BatchReader
from neuron_accuracy.capture.records import StepRecord
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.layout import Rows

__all__ = ["ROOT", "ModuleCapture", "capture_modules", "tensors_of"]

ROOT = "(root)"
"""What the model itself is called among its modules."""


class ModuleCapture:
    """Hooks on a model's modules that hand each forward pass to a writer as one step.

    A pass over token ids describes itself (see :class:`BatchReader`); any other is announced by :meth:`announce`.
    """

    def __init__(self, model: nn.Module, spec: CaptureSpec, writer: CaptureWriter) -> None:
        self._spec = spec
        self._writer = writer
        self._batches = BatchReader(inspect.signature(model.forward))
        self._announced: Batch | None = None
        self._batch: Batch | None = None
        self._held: dict[tuple[str, str], Tensor] = {}
        self._calls: dict[str, int] = {}
        self._warned: set[tuple[str, str]] = set()
        taken = self._taken(model)
        self._handles: list[Any] = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for name, module in taken:
            hook = self._tap(name, inspect.signature(module.forward))
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._end))

    def announce(self, step: StepRecord, keep: Tensor | None = None) -> None:
        """Say what the rows of the next forward pass are: ``keep`` is bool ``[batch, tokens]``, True where the
        flattened leading dimensions of its tensors hold a row; None if tensors are ``[rows, …]`` already.
        """
        self._announced = Batch(step, keep)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _taken(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        modules = [(name or ROOT, module) for name, module in model.named_modules()]
        taken = [(name, module) for name, module in modules if self._spec.wants_module(name)]
        if not taken:
            patterns = ", ".join(self._spec.modules)
            some = ", ".join([name for name, _ in modules[1:6]])
            raise CaptureError(f"no module matches {patterns}; the model has {some}, … and ** takes all")
        return taken

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch, self._announced = self._announced or self._batches.read(args, kwargs), None
        self._batch = batch if self._writer.wants(batch.step) else None
        self._held, self._calls = {}, {}

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._batch is not None:
            self._writer.write_step(self._batch.step, self._held)
        self._batch, self._held = None, {}

    def _tap(self, name: str, signature: inspect.Signature) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._batch is None:
                return
            call = self._calls[name] = self._calls.get(name, -1) + 1
            suffix = f"@{call}" if call else ""
            for tensor_name, tensor in (*_inputs(signature, args, kwargs), *_outputs(output)):
                if self._spec.wants_tensor(tensor_name):
                    self._take(self._batch, name, tensor_name + suffix, tensor)

        return hook

    def _take(self, batch: Batch, module: str, name: str, tensor: Tensor) -> None:
        layout = self._writer.run.layout(module, name, batch.step.phase)
        rows = batch.rows(tensor, layout.rows)
        if rows is not None:
            # A copy: a later module may write over it.
            self._held[module, name] = rows.detach().to("cpu", copy=True)
        elif (module, name) not in self._warned:
            self._warned.add((module, name))
            warnings.warn(
                f"{module}:{name} {list(tensor.shape)} is not captured: its leading dimensions are not the "
                f"{layout.rows} of the step; give its layout with rows {Rows.NONE} to take it as it is",
                stacklevel=3,
            )


@contextmanager
def capture_modules(model: nn.Module, spec: CaptureSpec, writer: CaptureWriter) -> Iterator[ModuleCapture]:
    """Capture what ``spec`` takes of every forward pass of ``model`` within the block.

    All outputs are taken, by place or name, however nested (``output.0``, ``output.1.0``, ``output.logits``); inputs
    by their place in the signature of ``forward``, however they were passed (``input.0``). A module that runs again in
    a pass adds ``@1``, ``@2``, … to their names. ``[batch, tokens, …]`` becomes rows of the tokens that the attention
    mask keeps; what has no such rows is left out with a warning. Raises ``CaptureError`` if no module matches, or a
    pass does not say what its tokens are.
    """
    taps = ModuleCapture(model, spec, writer)
    try:
        yield taps
    finally:
        taps.close()


def _inputs(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    places = {name: str(place) for place, name in enumerate(signature.parameters)}
    for place, value in enumerate(args):
        yield from tensors_of(f"input.{place}", value)
    for name, value in kwargs.items():
        yield from tensors_of(f"input.{places.get(name, name)}", value)


def _outputs(output: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield "output.0", output
    else:
        yield from tensors_of("output", output)


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a value by place, key or field, however nested: ``name.0``, ``name.hidden.1``, ….

    What is neither a tensor nor a tuple, list, mapping or dataclass of such is passed over.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(f"{name}.{key}", item)
    elif isinstance(value, tuple | list):
        for place, item in enumerate(value):
            yield from tensors_of(f"{name}.{place}", item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from tensors_of(f"{name}.{item.name}", getattr(value, item.name))
