# SPDX-License-Identifier: Apache-2.0
"""Asserts that a module computes what a reference does, as well as the reference does in its dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from neuron_accuracy.capture.hooks import tensors_of
from neuron_accuracy.compare.limits import Gates
from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.testing.gates import Verdict, three_way

__all__ = ["MakeInputs", "Runner", "assert_module_close"]

MakeInputs = Callable[[torch.Generator], Any]
"""Draws one input: a tensor, a tuple of positional or a mapping of keyword arguments. It is called anew for each dtype
with a generator of one seed, makes floating-point tensors in float32 and others as they are; both are then cast.
"""

Runner = Callable[..., Any]


def assert_module_close(
    module: Runner,
    reference: nn.Module | Runner,
    make_inputs: MakeInputs,
    *,
    dtype: torch.dtype,
    reference_dtype: torch.dtype = torch.float32,
    seeds: int = 10,
    gates: Gates | None = None,
    compare: Callable[[Any], Any] | None = None,
) -> list[Verdict]:
    """Assert the published three-way gates over ``seeds`` inputs, each output apart.

    ``module`` is run in ``dtype``. ``reference`` is run twice on the same inputs, rounded to ``dtype`` first: as it is
    in ``dtype``, and in ``reference_dtype`` for the truth. An ``nn.Module`` is copied and cast for that; any other
    callable is given inputs of the one dtype and of the other. Both must return tensors of equal shapes under the same
    names, in whatever order: keys of mappings, fields of dataclasses, places of tuples. Where one of them returns a
    tensor or a tuple only, places correspond. ``compare`` may first take from an output what is to be compared. Returns
    the figures if all pass. Raises ``AssertionError`` with a table if one does not, ``AccuracyError`` if outputs do not
    correspond, or one is empty.
    """
    if seeds < 1:
        raise AccuracyError(f"seeds={seeds}: at least one input is needed; 10 is the published number")
    truth, rounded = _cast(reference, reference_dtype), _cast(reference, dtype)
    runs: list[dict[str, list[Tensor]]] = [{}, {}, {}]
    for seed in range(seeds):
        for held, run, wanted in zip(
            runs, (truth, rounded, module), (reference_dtype, dtype, dtype), strict=True
        ):
            inputs = _inputs(make_inputs, seed, dtype, wanted)
            output = _call(run, inputs)
            for name, tensor in tensors_of("output", compare(output) if compare else output):
                held.setdefault(name, []).append(tensor)
    verdicts = list(_verdicts(runs, range(seeds), gates or Gates()))
    if not all(verdict.passed for verdict in verdicts):
        raise AssertionError(_table(verdicts, gates or Gates(), dtype, reference_dtype))
    return verdicts


def _verdicts(
    runs: Sequence[Mapping[str, list[Tensor]]], seeds: Sequence[int], gates: Gates
) -> Iterator[Verdict]:
    truth, rounded, test = runs
    for name, other in _paired(list(test), list(truth)).items():
        held = truth[other], rounded.get(other, ()), test[name]
        if any(len(tensors) != len(seeds) for tensors in held):
            raise AccuracyError(
                f"{name}: some inputs give it and others do not; compare= can take what corresponds"
            )
        for first, second in zip(held[0], held[2], strict=True):
            _check_shapes(name, second, first)
        yield three_way(name, seeds, *held, gates)


def _paired(test: Sequence[str], reference: Sequence[str]) -> dict[str, str]:
    """The reference's tensor of each of the module's: that of its name, or of its place where there are only places."""
    if not test or len(test) != len(reference):
        raise AccuracyError(
            f"the module returns {len(test)} tensors and the reference {len(reference)}; "
            "compare= can take what corresponds"
        )
    if set(test) == set(reference):
        return {name: name for name in test}
    if any(all(map(_is_place, side)) for side in (test, reference)):
        return dict(zip(test, reference, strict=True))
    raise AccuracyError(
        f"the module returns {', '.join(test)} and the reference {', '.join(reference)}; "
        "compare= can take what corresponds, under the same names"
    )


def _is_place(name: str) -> bool:
    return all(part.isdigit() for part in name.split(".")[1:])


def _check_shapes(name: str, test: Tensor, reference: Tensor) -> None:
    if test.shape != reference.shape:
        raise AccuracyError(
            f"{name} of the module is {list(test.shape)} and of the reference {list(reference.shape)}; "
            "compare= can bring them to one shape"
        )
    if not test.numel():
        raise AccuracyError(f"{name} is empty, {list(test.shape)}: inputs with at least one row are compared")


def _cast(reference: Runner, dtype: torch.dtype) -> Runner:
    if not isinstance(reference, nn.Module):
        return reference
    return copy.deepcopy(reference).to(dtype)


def _inputs(make_inputs: MakeInputs, seed: int, dtype: torch.dtype, wanted: torch.dtype) -> Any:
    drawn = make_inputs(torch.Generator().manual_seed(seed))
    return _mapped(drawn, lambda tensor: tensor.to(dtype).to(wanted))


def _mapped(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return cast(value) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _mapped(item, cast) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, cast) for item in value)
    return value


def _call(run: Runner, inputs: Any) -> Any:
    with torch.no_grad():
        if isinstance(inputs, Mapping):
            return run(**inputs)
        return run(*inputs) if isinstance(inputs, tuple) else run(inputs)


def _table(verdicts: Sequence[Verdict], gates: Gates, dtype: torch.dtype, reference: torch.dtype) -> str:
    table = Table(
        "output", "seed", "BC", "sigma", "worst L-inf ratio", "worst L2 ratio", "rel L2", "not finite"
    )
    for item in verdicts:
        worst = max(item.samples, key=lambda sample: sample.l2_ratio)
        bad = sum(sample.not_finite for sample in item.samples)
        figures = (item.bc, item.sigma, item.linf_ratio, item.l2_ratio, item.rel_l2)
        style = "" if item.passed else "FAILS "
        table.add_row(style + item.name, f"all {len(item.samples)}", *(f"{x:.3g}" for x in figures), str(bad))
        table.add_row(
            "", f"worst {worst.seed}", "", "", f"{worst.linf_ratio:.3g}", f"{worst.l2_ratio:.3g}", "", ""
        )
    console = Console(width=110, force_terminal=False, no_color=True)
    with console.capture() as printed:
        console.print(table)
    name, other = (str(item).removeprefix("torch.") for item in (dtype, reference))
    return (
        f"the module in {name} errs more than the reference in {name} does, against the reference in {other}; "
        f"passes if (BC >= {gates.bc} or sigma <= {gates.sigma}) and L-inf ratio < {gates.linf_ratio} and "
        f"L2 ratio < {gates.l2_ratio}\n{printed.get()}"
    )
