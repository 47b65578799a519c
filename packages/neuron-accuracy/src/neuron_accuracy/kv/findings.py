# SPDX-License-Identifier: Apache-2.0
"""From causes per request and layer to findings that each say one thing once."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_accuracy.findings import Finding, Level, Severity
from neuron_accuracy.kv.causes import Cause, ranges
from neuron_accuracy.kv.judge import Judge, Overwritten

__all__ = ["findings_of"]

_ORDER = (
    "not finite",
    "ranks disagree",
    "overwritten",
    "zeros",
    "swapped heads",
    "gain",
    "rotary",
    "diverges",
    "reference off",
)


_RUNS = 4
"""Gaps up to which positions are listed one by one."""
_NEARLY = 0.9
"""Share of the positions from the first wrong one on that makes it all of them."""


def findings_of(judges: Sequence[Judge], num_layers: int, num_heads: int) -> list[Finding]:
    """Findings of all requests, that of the first layer first, the same fault of several requests and layers as one."""
    placed: list[tuple[tuple[int, int], Finding]] = []
    for judge in judges:
        for item in judge.overwritten:
            finding = _overwritten(judge, item, num_layers)
            placed.append(((item.layers[0], _ORDER.index("overwritten")), finding))
    for causes in _grouped(judges):
        first = causes[0][1]
        finding = _finding(causes, judges, num_layers, num_heads)
        placed.append(((first.layer, _ORDER.index(first.kind)), finding))
    placed.sort(key=lambda item: item[0])
    return [finding for _, finding in placed] + _following(judges)


Group = list[tuple[Judge, Cause]]


def _grouped(judges: Sequence[Judge]) -> list[Group]:
    """The same thing wrong: equal in kind, heads and what it is, in any layer, request, and part."""
    groups: dict[tuple[object, ...], Group] = {}
    for judge in judges:
        for cause in judge.causes:
            alone = (cause.layer,) if cause.kind in ("diverges", "not finite") else ()
            what = "" if cause.kind == "rotary" else cause.what  # bases are fitted anew for each request
            groups.setdefault((cause.kind, cause.heads, what, *alone), []).append((judge, cause))
    split: list[Group] = []
    for group in groups.values():
        split += _by_part(group)
    for group in split:
        group.sort(key=lambda item: item[1].layer)
    return split


def _by_part(group: Group) -> list[Group]:
    """Keys and values together only where they have it in the same layers."""
    parts = sorted({cause.part for _, cause in group})
    layers = {part: {(id(judge), c.layer) for judge, c in group if c.part == part} for part in parts}
    if len(parts) == 2 and layers[parts[0]] != layers[parts[1]]:
        return [[item for item in group if item[1].part == part] for part in parts]
    return [group]


def _finding(group: Group, judges: Sequence[Judge], num_layers: int, num_heads: int) -> Finding:
    first = group[0][1]
    parts = " and ".join(sorted({cause.part for _, cause in group}))
    layers = sorted({cause.layer for _, cause in group})
    where = f"{parts} of {_layers(layers, num_layers)}"
    if len(first.heads) < num_heads:
        where += f", head{'s' * (len(first.heads) > 1)} {ranges(first.heads)}"
    positions = sorted({position for _, cause in group for position in cause.positions})
    if positions:
        where += f", {_positions(positions)}"
    detail = f"{_SENTENCES[first.kind](group, layers, positions)}; {_requests(group, judges)}"
    level = Level.INPUT if first.kind in ("ranks disagree",) else Level.KV
    return Finding(level, first.kind, where, detail, figures=first.figures)


def _layers(layers: Sequence[int], num_layers: int) -> str:
    if len(layers) == num_layers and num_layers > 1:
        return "all layers"
    return f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"


def _positions(positions: Sequence[int]) -> str:
    said = ranges(positions)
    if said.count(",") > _RUNS:
        return f"{len(positions)} positions from {positions[0]} to {positions[-1]}"
    return f"position{'s' * (len(positions) > 1)} {said}"


def _requests(group: Group, judges: Sequence[Judge]) -> str:
    names = list(dict.fromkeys(judge.pair.request for judge, _ in group))
    if len(judges) == 1:
        return f"request {names[0]}"
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    return f"in {len(names)} of {len(judges)} requests ({shown})"


def _overwritten(judge: Judge, item: Overwritten, num_layers: int) -> Finding:
    positions = item.positions
    others = [place for place in range(judge.pair.length) if place not in set(positions)]
    around = [
        name
        for name, there in (
            ("before", any(place < positions[0] for place in others)),
            ("after", any(place > positions[-1] for place in others)),
        )
        if there
    ]
    detail = (
        f"{_positions(positions)} ({judge.describe_block(item)}) {'do' if len(positions) > 1 else 'does'} not agree, "
        f"although positions {' and '.join(around) or 'between'} do: the block was overwritten "
        f"(relative error {item.error:.2g})"
    )
    if any("cached" in name for name in [judge.describe_block(item)]):
        detail += "; an earlier request had left it in the cache"
    where = f"request {judge.pair.request}, {_positions(positions)}, {_layers(item.layers, num_layers)}"
    return Finding(Level.KV, "overwritten", where, detail, figures={"relative_l2": item.error})


def _following(judges: Sequence[Judge]) -> list[Finding]:
    layers = sorted({layer for judge in judges for layer in judge.following})
    if not layers:
        return []
    first = min(judge.first_cause for judge in judges if judge.following and judge.first_cause is not None)
    detail = f"do not agree either; they compute with what layer {first} left them, so look there first"
    where = f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"
    return [Finding(Level.KV, "follows", where, detail, Severity.NOTE)]


def _swapped(group: Group, layers: Sequence[int], positions: Sequence[int]) -> str:
    cause = group[0][1]
    heads = f"head{'s' * (len(cause.heads) > 1)} {ranges(cause.heads)}"
    what = cause.what if len(cause.heads) == 1 else cause.what.replace("holds", "hold", 1)
    return f"{heads} {what} (cosine {cause.figures['cosine']:.5f}; with its own {cause.figures['cosine_with_own']:.3f})"


def _gain(group: Group, layers: Sequence[int], positions: Sequence[int]) -> str:
    cause = group[0][1]
    return (
        f"{cause.what}: a multiple of the reference, as a wrong scale leaves it "
        f"(relative error {cause.figures['residual']:.2g} once divided by it)"
    )


def _rotary(group: Group, layers: Sequence[int], positions: Sequence[int]) -> str:
    cause = group[0][1]
    return (
        f"keys from layer {layers[0]} on diverge with position, position 0 agrees: {cause.what} "
        f"(relative error {cause.figures['residual']:.2g} once turned back)"
    )


def _diverges(group: Group, layers: Sequence[int], positions: Sequence[int]) -> str:
    cause = max((cause for _, cause in group), key=lambda item: item.figures["relative_l2"])
    text = (
        f"relative error {cause.figures['relative_l2']:.3g}, limit {cause.figures['limit']:.3g}, worst at position "
        f"{cause.figures['worst_position']:.0f}"
    )
    return text + _shape(positions, max(judge.pair.length for judge, _ in group))


def _shape(positions: Sequence[int], length: int) -> str:
    if positions and len(positions) >= _NEARLY * (length - positions[0]):
        if positions[0] == 0:
            return "; wrong from position 0 on, so already in prefill"
        return f"; right up to position {positions[0] - 1}, wrong from there on"
    return ""


def _plain(group: Group, layers: Sequence[int], positions: Sequence[int]) -> str:
    return group[0][1].what


_SENTENCES = {
    "not finite": _plain,
    "ranks disagree": _plain,
    "zeros": _plain,
    "swapped heads": _swapped,
    "gain": _gain,
    "rotary": _rotary,
    "diverges": _diverges,
    "reference off": _plain,
}
