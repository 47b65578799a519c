# SPDX-License-Identifier: Apache-2.0
"""The first module whose replacement makes two runs agree: halving the modules, whose outputs come from a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Finding, Level, Outcome, Severity
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.protocol import Scores

__all__ = ["Replaceable", "bisect", "disagreement"]

Sequences = Sequence[Sequence[int]]


@runtime_checkable
class Replaceable(Protocol):
    """A subject whose modules' outputs can come from a capture: it has the ability ``replace``."""

    def info(self) -> SubjectInfo:
        """Who it is."""
        ...

    def candidates(self, reference: Path, patterns: Sequence[str]) -> Sequence[str]:
        """Names of the modules that can be replaced from the capture ``reference``, in the order they run last."""
        ...

    def force_replaced(
        self,
        prompts: Sequences,
        continuations: Sequences,
        reference: Path,
        patterns: Sequence[str],
        chosen: Sequence[str],
    ) -> list[Scores]:
        """Whole rows of scores, with the outputs of ``chosen`` ones of those candidates from the capture."""
        ...


@dataclass(frozen=True)
class _Probe:
    replaced: int
    disagreement: float
    agrees: bool


def disagreement(test: Sequence[Scores], reference: Sequence[Scores]) -> float:
    """Largest relative L2 difference of a row of logits, each row less its mean: softmax does not see that.

    Infinite if a row is not finite on one side. Raises ``AccuracyError`` unless both have whole rows of one shape.
    """
    worst = 0.0
    for ours, theirs in zip(test, reference, strict=True):
        if ours.logits is None or theirs.logits is None or ours.logits.shape != theirs.logits.shape:
            raise AccuracyError("bisection needs whole rows of logits of the same sequences on both sides")
        found, expected = (item.logits.double() for item in (ours, theirs) if item.logits is not None)
        found, expected = found - found.mean(1, keepdim=True), expected - expected.mean(1, keepdim=True)
        rows = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)
        worst = max(worst, float(rows.nan_to_num(float("inf")).max()))
    return worst


def bisect(
    test: Replaceable,
    expected: Sequence[Scores],
    reference: Path,
    prompts: Sequences,
    continuations: Sequences,
    *,
    limit: float,
    patterns: Sequence[str] = ("**",),
    names: tuple[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Find the module that makes the scores of ``test`` differ from ``expected`` by more than ``limit``.

    ``reference`` is the capture of the run that gave ``expected``, with the outputs of every module that ``patterns``
    select. With the outputs of the first k modules taken from it, whatever goes wrong in those does no harm; so the
    least k that restores agreement ends at the faulty module, the last one if there are several. Each probe is a run of
    all sequences, and there are about log2 of the number of modules. Data: ``probes`` in order, ``module``,
    ``alone`` (the disagreement with only that module replaced), ``limit``.

    Raises ``AccuracyError`` if there is no module to replace.
    """
    modules = list(test.candidates(reference, patterns))
    if not modules:
        raise AccuracyError(
            f"{reference} has none of the modules of {test.info().model}; capture them with ['**']"
        )
    total = len(modules).bit_length() + 3
    probes: list[_Probe] = []

    def probe(chosen: Sequence[str]) -> _Probe:
        scores = test.force_replaced(prompts, continuations, reference, patterns, chosen)
        apart = disagreement(scores, expected)
        probes.append(_Probe(len(chosen), apart, apart <= limit))
        progress(len(probes), total)
        return probes[-1]

    names = names or (test.info().model, str(reference))
    untouched = probe([])
    if untouched.agrees:
        detail = f"relative L2 {untouched.disagreement:.3g} is within {limit:g}"
        note = Finding(Level.TENSOR, "agrees", "logits", detail, Severity.NOTE)
        return _outcome(names, note, probes, limit)
    everything = probe(modules)
    if not everything.agrees:
        return _outcome(names, _in_none(modules, everything, limit), probes, limit)
    module = modules[_least(len(modules), lambda count: probe(modules[:count]).agrees) - 1]
    alone = probe([module])
    return _outcome(names, _named(module, untouched, alone, limit), probes, limit, module, alone)


def _least(high: int, agrees: Callable[[int], bool]) -> int:
    """The least count that agrees, where ``high`` does and none does not."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if agrees(middle) else (middle, high)
    return high


def _in_none(modules: Sequence[str], everything: _Probe, limit: float) -> Finding:
    detail = (
        f"relative L2 {everything.disagreement:.3g} remains with all {len(modules)} modules replaced, limit {limit:g}: "
        "what goes wrong lies in none of them"
    )
    return Finding(Level.TENSOR, "not in any module", f"after {modules[-1]}", detail)


def _named(module: str, untouched: _Probe, alone: _Probe, limit: float) -> Finding:
    only = (
        "replacing it alone restores agreement"
        if alone.agrees
        else f"replacing it alone leaves {alone.disagreement:.3g}: it is the last of several"
    )
    detail = f"logits are {untouched.disagreement:.3g} apart (relative L2, limit {limit:g}); {only}"
    figures = {"disagreement": untouched.disagreement, "alone": alone.disagreement, "limit": limit}
    return Finding(Level.TENSOR, "diverges", module, detail, figures=figures)


def _outcome(
    names: tuple[str, str],
    finding: Finding,
    probes: Sequence[_Probe],
    limit: float,
    module: str | None = None,
    alone: _Probe | None = None,
) -> Outcome:
    rows = [{"replaced": p.replaced, "relative_l2": p.disagreement, "agrees": p.agrees} for p in probes]
    data = {
        "probes": rows,
        "limit": limit,
        "module": module,
        "alone": None if alone is None else alone.disagreement,
    }
    return Outcome("bisect", "Bisection", *names, [finding], data)
