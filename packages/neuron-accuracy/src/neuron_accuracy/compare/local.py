# SPDX-License-Identifier: Apache-2.0
"""What each module adds to the error by itself: its captured input through the reference's module in full precision.

A difference between two runs holds all that came before; this holds one module, whatever its input was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import StepRecord
from neuron_accuracy.compare.views import View, ViewReader, views_of
from neuron_accuracy.findings import Finding, Level
from neuron_accuracy.layout import Rows

__all__ = ["FULL_LIMIT", "RATIO", "LocalError", "check_modules", "leaves"]

RATIO = 3.0
"""How many times the error of rounding the exact result once a module's error may be, if it computes in half precision.

A product that adds up in float32 and rounds its result has 1, and one that is summed over n ranks, each rounding, about
the root of n more. A sum of k terms in the half precision itself has about the root of k.
"""
FULL_LIMIT = 1e-5
"""Largest relative L2 error of one module in float32: sums of thousands of terms in any order are below 1e-6."""

_HALF = (torch.bfloat16, torch.float16)

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LocalError:
    """Of one module, over all rows that were captured."""

    module: str
    """As the reference calls it."""
    source: str
    relative_l2: float
    rounding: float
    """Relative L2 error of the exact result, rounded once to the dtype."""
    limit: float

    @property
    def passes(self) -> bool:
        """Whether it is within the limit; what is no number is not."""
        return self.relative_l2 <= self.limit


def leaves(model: nn.Module) -> dict[str, Apply]:
    """The modules of a model that have none inside and take and give one tensor of rows: projections and norms.

    Each computes in float32 with the weights that the model has, whatever its dtype.
    """
    kinds = (nn.Linear, nn.LayerNorm)
    return {
        name: partial(_in_full, module)
        for name, module in model.named_modules()
        if isinstance(module, kinds) or type(module).__name__.endswith("RMSNorm")
    }


def _in_full(module: nn.Module, rows: Tensor) -> Tensor:
    """``rows [n, features]`` through the module; a norm of heads takes them apart, side by side as they are."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 1 and rows.shape[1] != len(weight):
        rows = rows.unflatten(1, (-1, len(weight)))
    wide: Tensor = copy.deepcopy(module).float()(rows)
    return wide.flatten(1)


def check_modules(test: Capture, modules: Mapping[str, Apply]) -> tuple[list[Finding], list[LocalError]]:
    """Run the captured inputs of ``test`` through the reference's ``modules``, and hold its outputs against theirs.

    A module is looked at if the capture has its input and output by names of ``modules``, in the order they ran.
    """
    views = views_of(test)
    errors = []
    for view in views.values():
        module, _, tensor = view.name.partition(":")
        own_input = views.get(f"{module}:input.0")
        if own_input is None and view.part is not None:  # a fused projection has one input for all its slices
            own_input = next((v for v in views.values() if v.source == f"{view.module}:input.0"), None)
        if tensor == "output.0" and module in modules and own_input is not None:
            found = _measure(test, view, own_input, modules[module])
            errors += [found] if found is not None else []
    return [_finding(error) for error in errors if not error.passes], errors


@torch.no_grad()
def _measure(test: Capture, view: View, given: View, apply: Apply) -> LocalError | None:
    error = exact = rounding = 0.0
    dtype = torch.float32
    for inputs, outputs in _rows(test, given, view):
        dtype = outputs.dtype
        expected = apply(inputs.float())
        error += float((outputs.double() - expected.double()).square().sum())
        rounding += float((expected.to(dtype).double() - expected.double()).square().sum())
        exact += float(expected.double().square().sum())
    if not exact:
        return None
    relative, once = math.sqrt(error / exact), math.sqrt(rounding / exact)
    limit = FULL_LIMIT
    if dtype in _HALF:
        limit = RATIO * math.sqrt(test.run.ranks) * once
    return LocalError(view.name.partition(":")[0], view.source, relative, once, limit)


def _rows(test: Capture, given: View, view: View) -> Iterator[tuple[Tensor, Tensor]]:
    readers = ViewReader(test, given), ViewReader(test, view)
    for dp in test.replicas:
        for step in test.steps(dp):
            if all(reader.holds(dp, step) for reader in readers):
                index = _real_rows(step, view.layout.rows)
                if len(index):
                    end = int(index.max()) + 1
                    inputs, outputs = (reader.rows(dp, step, 0, end)[index] for reader in readers)
                    yield inputs, outputs


def _real_rows(step: StepRecord, kind: Rows) -> Tensor:
    if kind is Rows.TOKENS:
        spans = [torch.arange(row.begin, row.begin + len(row.positions)) for row in step.rows]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
    return torch.tensor([row.row for row in step.rows] if kind is Rows.REQUESTS else [], dtype=torch.int64)


def _finding(error: LocalError) -> Finding:
    how = (
        f"{error.relative_l2 / error.rounding:.1f} times what rounding its exact result once loses, limit "
        f"{error.limit / error.rounding:.1f}: it adds up in too few bits, or its weights differ"
        if error.rounding and error.limit > FULL_LIMIT
        else f"limit {error.limit:g}: its weights differ, or it computes something else"
    )
    detail = f"of its own input it makes an error of {error.relative_l2:.3g} (relative L2), {how}"
    if error.source != f"{error.module}:output.0":
        detail += f"; the test calls it {error.source}"
    figures = {"relative_l2": error.relative_l2, "rounding": error.rounding, "limit": error.limit}
    return Finding(Level.TENSOR, "loses precision", f"{error.module}:output.0", detail, figures=figures)
