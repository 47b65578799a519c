# SPDX-License-Identifier: Apache-2.0
"""Runs a compiled NEFF through ``nrtpy``. **It has not been run on hardware.**

Written against AWS's page of that package (aws-neuron-sdk: neuron-runtime/nrtpy/). It moves every tensor to the device
and back at each call: a way to check a graph on a device, not to serve. Serving needs tensors that stay on the device.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from neuron_core.devices.nrt_status import nrt_error
from neuron_core.errors import CacheError, DeviceError
from neuron_core.graphs.compilers.captured import CapturedFiles
from neuron_core.graphs.compilers.hlo import HloFacts
from neuron_core.graphs.program import TensorSpec
from neuron_core.protocols import GraphCall

__all__ = ["load_neff", "load_nrtpy"]

_NOT_RUN = "running a NEFF has not been tried on hardware; it needs"
_NUMBERED = re.compile(r"(.*?)(\d+)")


def load_nrtpy() -> Any:
    """The real ``nrtpy``. Raises ``DeviceError`` naming what is needed when it is missing or a placeholder."""
    try:
        module = importlib.import_module("nrtpy")
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DeviceError(
            f"{_NOT_RUN} a Neuron device, its driver and runtime, and the package nrtpy from AWS's index ({reason})"
        ) from error
    if not hasattr(module, "NrtpyModel") or not hasattr(module, "NrtpyTensor"):
        raise DeviceError(f"{_NOT_RUN} nrtpy from AWS's index; the nrtpy that is installed is a placeholder")
    return module


def load_neff(neff: Path, entry: Path) -> GraphCall:
    """The callable of an entry's NEFF.

    Raises ``DeviceError`` without a runtime, and ``CacheError`` when the NEFF's tensors are not the graph's.
    """
    captured, facts = CapturedFiles.read(entry), HloFacts.read(entry)
    if captured.groups:
        raise DeviceError(f"{_NOT_RUN} one process per rank for the collectives of {captured.label}")
    nrtpy = load_nrtpy()
    try:
        model = nrtpy.NrtpyModel.load_from_neff(neff)
    except RuntimeError as error:
        raise nrt_error(f"loading {neff}", str(error)) from error
    inputs = [
        captured.specs[index] if index >= 0 else TensorSpec.of(facts.constants[number])
        for number, index in enumerate(facts.parameters)
    ]
    in_names = _names(neff, "input", model.input_tensors_info, inputs)
    out_names = _names(neff, "output", model.output_tensors_info, captured.outputs)
    return _call(nrtpy, model, (in_names, out_names), captured, facts)


def _call(
    nrtpy: Any,
    model: Any,
    names: tuple[list[str], list[str]],
    captured: CapturedFiles,
    facts: HloFacts,
) -> GraphCall:
    in_names, out_names = names
    aliased = dict(facts.aliases)
    metadata, outputs = captured.metadata, captured.outputs

    def call(args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        values = [
            args[index] if index >= 0 else facts.constants[number]
            for number, index in enumerate(facts.parameters)
        ]
        inputs = {
            name: nrtpy.NrtpyTensor.from_numpy(_bytes(value), name=name)
            for name, value in zip(in_names, values, strict=True)
        }
        results = {}
        for number, (name, spec) in enumerate(zip(out_names, outputs, strict=True)):
            room = _bytes(torch.zeros(spec.shape, dtype=spec.dtype))
            shared = inputs[in_names[aliased[number]]] if number in aliased else None
            results[name] = shared or nrtpy.NrtpyTensor.from_numpy(room, name=name)
        try:
            model(inputs=inputs, outputs=results)
        except RuntimeError as error:
            raise nrt_error(f"running {captured.label}", str(error)) from error
        tensors = [
            _tensor(results[name].numpy(), spec) for name, spec in zip(out_names, outputs, strict=True)
        ]
        for output, index in metadata.io_map:
            args[index].copy_(tensors[output])
        return tensors[: metadata.num_outputs]

    return call


def _names(neff: Path, kind: str, info: Mapping[str, Any], specs: Sequence[TensorSpec]) -> list[str]:
    """The NEFF's tensor names in the order of the HLO's; they end in their number, and sizes must agree."""
    numbered = sorted(info, key=_number(neff))
    sizes = [int(info[name].size) for name in numbered]
    expected = [_size_bytes(spec) for spec in specs]
    if sizes != expected:
        found = dict(zip(numbered, sizes, strict=True))
        raise CacheError(f"{neff}: its {kind}s in bytes, {found}, are not those of the graph, {expected}")
    return numbered


def _number(neff: Path) -> Callable[[str], int]:
    def number(name: str) -> int:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            raise CacheError(f"{neff}: a tensor is named {name!r}; only names that end in a number are known")
        return int(match[2])

    return number


def _size_bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _tensor(array: Any, spec: TensorSpec) -> torch.Tensor:
    flat = torch.from_numpy(array).reshape(-1).view(torch.uint8)
    return flat.view(spec.dtype).reshape(spec.shape)
