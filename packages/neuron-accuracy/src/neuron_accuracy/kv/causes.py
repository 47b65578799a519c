# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with one layer's keys or values, told from the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from neuron_accuracy.kv.figures import Figures, measure
from neuron_accuracy.kv.limits import Limits
from neuron_accuracy.kv.rotary import bases, fit

__all__ = ["Cause", "Part", "Sight", "explain", "ranges"]

Part = str
"""``keys`` or ``values``."""

_RESIDUAL = 2.0
"""A cause explains a layer when what it leaves is within this many times the head's limit: it is fitted to one side."""
_EXTENDS = 0.5
"""In layers after the first, whose inputs differ already, a cause holds on when it explains this much of the error."""
_SAME_GAIN = 0.02
"""Gains of a layer's heads that differ by less are one."""
_LIKE_GAIN = 0.1
"""The same, of a layer whose inputs differ already."""


@dataclass(frozen=True)
class Cause:
    """One thing wrong with one part of one layer of a request."""

    kind: str
    part: Part
    heads: tuple[int, ...]
    what: str
    """What distinguishes it from others of its kind: the head it was swapped with, the gain, the bases."""
    layer: int
    positions: tuple[int, ...] = ()
    figures: dict[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, eq=False)
class Sight:
    """One part of one layer over the positions that are still to be explained."""

    part: Part
    layer: int
    test: torch.Tensor
    """Float32 ``[heads, P, D]``, finite."""
    reference: torch.Tensor
    positions: torch.Tensor
    """Int64 ``[P]``."""
    figures: Figures
    head_limit: torch.Tensor
    """Float64 ``[heads]``."""
    position_limit: torch.Tensor
    """Float64 ``[heads, P]``."""
    limits: Limits

    @property
    def bad_heads(self) -> torch.Tensor:
        """Bool ``[heads]``: over a limit as a whole or somewhere."""
        return (self.figures.relative_l2 > self.head_limit) | self.bad.any(dim=1)

    @property
    def bad(self) -> torch.Tensor:
        """Bool ``[heads, P]``: positions over their limit, or over the head's where the head is."""
        errors = self.figures.by_position
        head = (self.figures.relative_l2 > self.head_limit)[:, None]
        return (errors > self.position_limit) | (head & (errors > self.head_limit[:, None]))

    def at(self, mask: torch.Tensor) -> Sight:
        """The same at some of its positions, bool ``[P]``, measured anew."""
        test, reference = self.test[:, mask], self.reference[:, mask]
        return Sight(
            self.part,
            self.layer,
            test,
            reference,
            self.positions[mask],
            measure(test, reference),
            self.head_limit,
            self.position_limit[:, mask],
            self.limits,
        )


def explain(sight: Sight, known: Sequence[Cause]) -> tuple[list[Cause], list[int]]:
    """The causes of what is wrong, and the heads that none explains. ``known`` are those of layers before it."""
    bad = [int(head) for head in sight.bad_heads.nonzero()]
    found: list[Cause] = []
    for name in (_zero, _swapped, _gain):
        for head in bad:
            cause = name(sight, head, known)
            if cause is not None and all(head not in other.heads for other in found):
                found.append(cause)
    left = [head for head in bad if all(head not in cause.heads for cause in found)]
    if left and sight.part == "keys" and (turned := _rotation(sight, left, known)) is not None:
        found.append(turned)
        left = []
    return _joined(found), left


def ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7`` of 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _zero(sight: Sight, head: int, known: Sequence[Cause]) -> Cause | None:
    if sight.test[head].any():
        return None
    return Cause("zeros", sight.part, (head,), "holds zeros only: nothing was written", sight.layer)


def _swapped(sight: Sight, head: int, known: Sequence[Cause]) -> Cause | None:
    """The reference's head that this one is nearest to, if it is not its own."""
    ours, heads = sight.test[head], sight.reference
    distances = _distances(ours, heads)
    other = int(distances.argmin())
    if other == head:
        return None
    named = f"holds what the reference has in head {other}"
    before = any(
        cause.kind == "swapped heads" and head in cause.heads and cause.what == named for cause in known
    )
    if not _explains(float(distances[other]), float(distances[head]), float(sight.head_limit[head]), before):
        return None
    cosines = torch.nn.functional.cosine_similarity(ours.flatten()[None].double(), heads.flatten(1).double())
    figures = {"cosine": float(cosines[other]), "cosine_with_own": float(cosines[head])}
    return Cause("swapped heads", sight.part, (head,), named, sight.layer, figures=figures)


def _distances(ours: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    norms = heads.flatten(1).double().norm(dim=1).clamp_min(1e-30)
    distances: torch.Tensor = (ours - heads).flatten(1).double().norm(dim=1) / norms
    return distances


def _gain(sight: Sight, head: int, known: Sequence[Cause]) -> Cause | None:
    """Whether the head is a multiple of what it should be."""
    gain = float(sight.figures.sums.metrics()["gain"][head])
    own, limit = float(sight.figures.relative_l2[head]), float(sight.head_limit[head])
    if not abs(gain) < float("inf") or abs(gain - 1) <= limit or gain == 0:
        return None
    ours, theirs = sight.test[head].double(), sight.reference[head].double()
    residual = float((ours - gain * theirs).norm() / (abs(gain) * theirs.norm()))
    before = any(
        cause.kind == "gain" and head in cause.heads and abs(cause.figures["gain"] / gain - 1) < _LIKE_GAIN
        for cause in known
    )
    if not _explains(residual, own, limit, before):
        return None
    figures = {"gain": gain, "residual": residual}
    return Cause(
        "gain",
        sight.part,
        (head,),
        f"gain {gain:.2f}" if abs(gain - 1) >= 0.01 else f"gain {gain:.6f}",
        sight.layer,
        figures=figures,
    )


def _rotation(sight: Sight, heads: list[int], known: Sequence[Cause]) -> Cause | None:
    """Whether keys that agree at position 0 are turned by an angle that grows with the position."""
    ours, theirs, positions = sight.test[heads], sight.reference[heads], sight.positions
    if ours.shape[-1] % 2 or len(positions) < 4 or sight.bad[:, positions == 0].any():
        return None
    limit, own = float(sight.head_limit[heads].max()), float((ours - theirs).norm() / theirs.norm())
    earlier = next((cause.what for cause in known if cause.kind == "rotary"), None)
    rotation = fit(ours, theirs, positions)
    if not _explains(rotation.residual, own, limit, earlier is not None):
        return None
    what = earlier or _rotary_bases(rotation.slopes)
    slope = float(rotation.slopes.abs().max())
    figures = {"residual": rotation.residual, "radians_per_position": slope}
    return Cause("rotary", sight.part, tuple(heads), what, sight.layer, figures=figures)


def _rotary_bases(slopes: torch.Tensor) -> str:
    found = bases(slopes)
    if found is None:
        return f"the angles of rotation differ, by up to {float(slopes.abs().max()):.3g} radians a position"
    test, reference = (_rounded(base) for base in found)
    return f"rotary base differs: about {test} against {reference}"


def _rounded(base: float) -> str:
    return f"{float(f'{base:.3g}'):,.0f}"


def _explains(left: float, own: float, limit: float, before: bool) -> bool:
    return left <= _EXTENDS * own and (before or left <= _RESIDUAL * limit)


def _joined(causes: list[Cause]) -> list[Cause]:
    """Heads with the same thing wrong are one cause."""
    joined: list[Cause] = []
    for cause in causes:
        place = next((i for i, other in enumerate(joined) if _alike(cause, other)), None)
        if place is None:
            joined.append(cause)
        else:
            heads = tuple(sorted(joined[place].heads + cause.heads))
            joined[place] = replace(joined[place], heads=heads)
    return joined


def _alike(cause: Cause, other: Cause) -> bool:
    if cause.kind != other.kind:
        return False
    if cause.kind == "gain":
        return abs(cause.figures["gain"] / other.figures["gain"] - 1) < _SAME_GAIN
    return cause.what == other.what
