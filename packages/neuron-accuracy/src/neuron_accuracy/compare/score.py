# SPDX-License-Identifier: Apache-2.0
"""What a comparison says of one tensor: figures, and where in it they are worst."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from neuron_accuracy.compare.limits import Limits, TwoWay
from neuron_accuracy.compare.metrics import ULP_LABELS, ratio
from neuron_accuracy.compare.requests import ranges
from neuron_accuracy.compare.tally import Tally

__all__ = ["Gain", "Head", "RowSpan", "Score", "score"]

FLOOR = 1 / 16
"""The reference's own error counts as at least this many ulps of its size, so that where it rounds nothing a test that
does is not infinitely worse."""

MIN_ROWS = 8
"""Rows of one size that a channel's slope must rest on."""

ALONE = 0.9
"""Share of the squared error that makes a part of a tensor the only one that differs."""


@dataclass(frozen=True)
class Gain:
    """A channel whose values are those of the reference times ``slope``."""

    channel: int
    slope: float
    """Least squares, through zero."""
    error: float
    """Standard error of the slope."""
    z: float
    """Distance from 1 in standard errors."""


@dataclass(frozen=True)
class Head:
    """One head."""

    head: int
    cosine: float
    rel_l2: float
    equals: int | None
    """The reference's head that it equals instead of its own."""


@dataclass(frozen=True)
class RowSpan:
    """Positions of one request that differ where others do not."""

    pair: int
    positions: tuple[int, ...]


@dataclass
class Score:
    """All that is said of one tensor; ``reasons`` says why it fails, empty if it does not."""

    name: str
    tally: Tally
    allowed: TwoWay
    dtypes: tuple[torch.dtype, ...]
    """Of the test, the reference and the baseline."""
    sources: tuple[str, ...]
    figures: dict[str, float]
    coarsest: torch.dtype
    """By which its limits go."""
    reasons: list[str] = field(default_factory=list)
    sharper: list[str] = field(default_factory=list)
    """What part of the tensor it is, if not all."""
    gains: list[Gain] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    rows: list[RowSpan] = field(default_factory=list)
    grew: bool = False
    """Whether its error is one that its input does not explain."""
    input_rel_l2: float | None = None
    """Of the module's first input, if both runs have it."""
    verdict: str = "agrees"
    """``agrees``, ``makes`` an error, ``diverges`` first or with inputs not known, or ``inherits`` one."""

    @property
    def module(self) -> str:
        """Its module, as other runs call it."""
        return self.name.partition(":")[0]

    @property
    def local(self) -> bool:
        """Whether it fails in a part of the tensor only."""
        return bool(self.gains or self.rows or self.sharper)

    @property
    def error(self) -> float:
        """How far it is off for what is made of it: a few huge channels, as of a residual stream, hide no other."""
        return max(self.tally.rel_l2, self.tally.even_l2)

    @property
    def is_input(self) -> bool:
        """Whether it is what its module was given."""
        return self.name.partition(":")[2].startswith("input.")

    def to_json(self) -> dict[str, Any]:
        """A row of the table of modules."""
        return {
            "name": self.name,
            "sources": list(self.sources),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
            "rows": self.tally.rows,
            "features": self.tally.features,
            **self.figures,
            "ulps": dict(zip(ULP_LABELS, self.tally.ulps.tolist(), strict=True))
            if self.tally.dtype
            else None,
            "input_rel_l2": self.input_rel_l2,
            "verdict": self.verdict,
            "reasons": self.reasons,
            "sharper": self.sharper,
        }


def score(
    name: str,
    tally: Tally,
    dtypes: tuple[torch.dtype, ...],
    sources: tuple[str, ...],
    coarsest: torch.dtype,
    limits: Limits,
    requests: Sequence[str],
) -> Score:
    """Judge one tensor by itself, by the limits of the ``coarsest`` dtype that it or its run has; ``requests`` are the
    names of the pairs.
    """
    allowed = limits.of(coarsest)
    found = Score(
        name, tally, allowed, dtypes, sources, _figures(tally, len(dtypes) == 3, coarsest), coarsest
    )
    if tally.not_finite:
        found.reasons.append(_not_finite(tally, requests))
    if len(dtypes) == 3:
        _gate(found, limits, allowed)
    else:
        _limit(found, allowed)
    if not found.is_input:
        found.gains = _gains(tally, allowed.gain, limits.gain_z)
    if found.gains:
        found.reasons.append(_gain_reason(found.gains))
    _judge_heads(found, allowed)
    _judge_rows(found, allowed, requests)
    if found.reasons:
        _localise(found, requests)
    return found


def _figures(tally: Tally, three_way: bool, coarsest: torch.dtype) -> dict[str, float]:
    figures = {
        "cosine": tally.cosine,
        "rel_l2": tally.rel_l2,
        "linf": tally.linf,
        "linf_rel": tally.linf_rel,
        "bc": tally.bc,
    }
    if three_way:
        ulp = torch.finfo(coarsest).eps if coarsest.is_floating_point else 0.0
        floor = FLOOR * ulp
        linf, norm = tally.worst_ratios(floor, ulp / 2)
        figures |= {"sigma_ratio": tally.sigma_ratio(floor), "linf_ratio": linf, "l2_ratio": norm}
    return figures


def _limit(found: Score, allowed: TwoWay) -> None:
    for figure, most in (("rel_l2", allowed.rel_l2), ("linf_rel", allowed.linf_rel)):
        value = found.figures[figure]
        if not value <= most:
            found.reasons.append(f"{figure} {value:.3g} is above {most:g}")


def _gate(found: Score, limits: Limits, allowed: TwoWay) -> None:
    gates, figures = limits.gates, found.figures
    values = {name: figures[name] for name in ("bc", "sigma_ratio", "linf_ratio", "l2_ratio")}
    near = figures["rel_l2"] <= allowed.rel_l2 and figures["linf_rel"] <= allowed.linf_rel
    chance = near and values["sigma_ratio"] <= limits.chance
    if not gates.passes(*values.values()) and not chance:
        found.reasons.append(
            f"against the baseline BC {values['bc']:.3f} and sigma ratio {values['sigma_ratio']:.2f} "
            f"(at least {gates.bc} or at most {gates.sigma}), L-inf ratio {values['linf_ratio']:.2f} "
            f"(below {gates.linf_ratio}), L2 ratio {values['l2_ratio']:.2f} (below {gates.l2_ratio})"
        )


def _not_finite(tally: Tally, requests: Sequence[str]) -> str:
    at = tally.not_finite_at
    assert at is not None
    sides = [
        side for side, value in (("test", at.test), ("reference", at.reference)) if not math.isfinite(value)
    ]
    who = " and ".join(sides) or "baseline"
    return (
        f"{tally.not_finite} elements are not finite, the first in the {who}: {at.test:g} against {at.reference:g} "
        f"at position {at.position} of {requests[at.pair]}, channel {at.channel}"
    )


def _gains(tally: Tally, most: float, most_z: float) -> list[Gain]:
    """Channels that are a multiple of the reference's, in each half of positions and of requests.

    The slope's error is the one that holds for noise which grows with the value (White 1980), with no channel quieter
    than half of them are. A channel whose slope a handful of rows decide says nothing, nor one that is nearly the same
    in all rows: there one error that all rows inherit, as of a token that all attend to, looks like a slope.
    """
    sums, rows = tally.channels, tally.rows
    if rows < MIN_ROWS or not most or tally.features < 2:
        return []
    whole = [item.sum(0) for item in (sums.dr, sums.r, sums.rr, sums.rrrr, sums.ddrr, sums.drrr)]
    dr, r, rr, rrrr, ddrr, drrr = whole
    known = (rr > 0) & (rr.square() > MIN_ROWS * rrrr) & (r.square() < 0.5 * rows * rr)
    if not bool(known.any()):
        return []
    base = torch.where(rr > 0, rr, 1.0)
    off = dr / base
    spread = (ddrr - 2 * off * drrr + off.square() * rrrr).clamp_min(0)
    stderr = spread.sqrt() / base
    stderr = torch.maximum(stderr, stderr[known].median())
    z = torch.where(stderr > 0, off / stderr, torch.where(off == 0, 0.0, math.inf * off.sign()))
    usual = max(1.0, 1.4826 * float(z[known].abs().median()))
    parts = torch.where(sums.rr > 0, sums.dr / torch.where(sums.rr > 0, sums.rr, 1.0), off)
    alike = ((parts - off).abs() < off.abs() / 2).all(0)
    out = known & alike & (off.abs() > most) & (z.abs() > most_z * usual)
    return [
        Gain(channel, 1 + float(off[channel]), float(stderr[channel]), float(z[channel]))
        for channel in out.nonzero().flatten().tolist()
    ]


def _gain_reason(gains: Sequence[Gain]) -> str:
    first = gains[0]
    more = f" (and {len(gains) - 1} more channels)" if len(gains) > 1 else ""
    return (
        f"channel {first.channel} is {first.slope:.4f} ± {first.error:.4f} times the reference's, "
        f"{abs(first.z):.0f} standard errors from 1{more}"
    )


def _judge_heads(found: Score, allowed: TwoWay) -> None:
    sums = found.tally.by_head
    if sums is None:
        return
    norms = (sums.test.unsqueeze(1) * sums.reference.unsqueeze(0)).sqrt()
    cosines = torch.where(norms > 0, sums.dots / norms.clamp_min(1e-300), 0.0)
    for head in range(len(sums.test)):
        rel = ratio(math.sqrt(float(sums.error[head])), math.sqrt(float(sums.reference[head])))
        likest = int(cosines[head].argmax())
        equals = (
            likest if rel > allowed.head and likest != head and float(cosines[head, likest]) > 0.99 else None
        )
        found.heads.append(Head(head, float(cosines[head, head]), rel, equals))
    out = [item for item in found.heads if not item.rel_l2 <= allowed.head]
    for item in out[:4]:
        other = f"; it equals the reference's head {item.equals}" if item.equals is not None else ""
        found.reasons.append(f"head {item.head}: rel_l2 {item.rel_l2:.3g} is above {allowed.head:g}{other}")
    if out and len(out) < len(found.heads):
        found.sharper.append(f"only head{'s' * (len(out) > 1)} {ranges([item.head for item in out])}")


def _judge_rows(found: Score, allowed: TwoWay, requests: Sequence[str]) -> None:
    pairs, positions, error, reference, _ = found.tally.by_row()
    if not len(pairs):
        return
    # The mean would be that of the few rows of tokens that all others attend to: a hundred times longer than any other,
    # they would let each be anything. A row of zeros is held against the others.
    known = reference[reference > 0]
    size = torch.maximum(reference, known.median()) if len(known) else reference
    far = torch.where(
        size > 0, (error / size.clamp_min(1e-300)).sqrt(), torch.where(error > 0, math.inf, 0.0)
    )
    out = far > allowed.row
    if not bool(out.any()):
        return
    worst = int(far.argmax())
    found.reasons.append(
        f"position {int(positions[worst])} of {requests[int(pairs[worst])]}: its row is {float(far[worst]):.3g} of its "
        f"size off, above {allowed.row:g}"
    )
    if bool(out.all()) or not float(far[~out].max()) < allowed.row / 4:
        return
    for pair in pairs[out].unique().tolist():
        at = positions[out & (pairs == pair)].sort().values.tolist()
        found.rows.append(RowSpan(pair, tuple(at)))


def _localise(found: Score, requests: Sequence[str]) -> None:
    tally = found.tally
    if found.rows and tally.rows > 1:
        spans = [f"{ranges(item.positions)} of {requests[item.pair]}" for item in found.rows[:4]]
        found.sharper.append("only positions " + "; ".join(spans))
    channels = _few(tally.channels.dd.sum(0))
    if found.gains:
        channels = [gain.channel for gain in found.gains]
    if channels and not any(text.startswith("only head") for text in found.sharper):
        found.sharper.append(f"only channel{'s' * (len(channels) > 1)} {ranges(sorted(channels))}")


def _few(error: Tensor) -> list[int]:
    """The channels that make nearly all of the error, if they are few."""
    total = float(error.sum())
    if not total or len(error) < 8:
        return []
    falling = error.sort(descending=True)
    count = int((falling.values.cumsum(0) < ALONE * total).sum()) + 1
    return falling.indices[:count].tolist() if count <= len(error) // 20 + 1 else []
