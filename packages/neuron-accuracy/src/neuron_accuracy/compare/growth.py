# SPDX-License-Identifier: Apache-2.0
"""Errors that are small, but not for a module whose input is nearly right."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import torch

from neuron_accuracy.capture.hooks import ROOT
from neuron_accuracy.compare.limits import Limits
from neuron_accuracy.compare.score import Score

__all__ = ["judge_growth"]

MIN_KIND = 4
"""Modules of a kind from which what is usual for it can be told."""

LEAST_USUAL = 0.5
SPREADS = 6
"""A kind whose errors grow now more, now less, as those of norms do, is given that many of its median deviations."""


def judge_growth(scores: Sequence[Score], limits: Limits) -> None:
    """Add a reason to each output whose error its input does not explain: more than a few times the input's, or than is
    usual for the same module in other layers. Only modules that compute one layer are judged: a model of many gathers
    the errors of all.
    """
    inputs = {item.module: item for item in scores if item.name.endswith(":input.0")}
    modules = list(dict.fromkeys(item.module for item in scores))
    stacks, parents = _stacks(modules), _parents(modules)
    kinds: dict[str, list[tuple[Score, float]]] = defaultdict(list)
    for item in scores:
        given = inputs.get(item.module)
        judged = given is not None and item.tally.dtype is not None and item.module not in stacks
        if item.is_input or given is None or not judged or given.tally.dtype is None:
            continue
        made, error, given_error = item.allowed.made, item.tally.rel_l2, given.error
        if error > made + limits.growth * given_error and not item.reasons:
            item.grew = True
            item.reasons.append(
                f"rel_l2 {error:.3g} is above {made:g} and {limits.growth:g} times its input's {given_error:.3g}"
            )
        if item.module not in parents:
            least = torch.finfo(item.coarsest).eps / 4
            kinds[re.sub(r"\d+", "*", item.name)].append((item, error / max(given_error, least)))
    for members in kinds.values():
        _judge_kind(members, limits)


def _judge_kind(members: Sequence[tuple[Score, float]], limits: Limits) -> None:
    if len(members) < MIN_KIND:
        return
    middle = median(growth for _, growth in members)
    spread = median(abs(growth - middle) for _, growth in members)
    usual = max(middle, LEAST_USUAL)
    most = max(limits.growth * usual, usual + SPREADS * spread)
    for item, growth in members:
        least = torch.finfo(item.coarsest).eps / 2
        if growth > most and item.tally.rel_l2 > least and not item.reasons:
            item.grew = True
            item.reasons.append(
                f"its error is {growth:.2g} times its input's, {growth / usual:.2g} times what is usual for the "
                f"{len(members)} modules of its kind"
            )


def _parents(modules: Sequence[str]) -> set[str]:
    return {name[:at] for name in modules for at in range(len(name)) if name[at] == "."}


def _stacks(modules: Sequence[str]) -> set[str]:
    """Modules that hold two of one kind, so several layers."""
    held: dict[str, set[str]] = defaultdict(set)
    stacks: set[str] = {ROOT}
    for name in modules:
        kind = re.sub(r"\d+", "*", name)
        for at in (at for at, letter in enumerate(name) if letter == "."):
            parent = name[:at]
            key = f"{parent}\n{kind}"
            held[key].add(name)
            if len(held[key]) > 1:
                stacks.add(parent)
    return stacks
