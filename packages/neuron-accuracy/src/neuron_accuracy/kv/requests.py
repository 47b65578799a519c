# SPDX-License-Identifier: Apache-2.0
"""The caches of a capture, and which of one capture's belongs to which of another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import CacheRecord
from neuron_accuracy.errors import AccuracyError, CaptureError, LayoutError
from neuron_accuracy.kv.contiguous import Scales, contiguous, disagreeing, disagreeing_scales

__all__ = ["Cache", "Layer", "Pair", "caches_of", "common_prefix", "pair_up"]


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a request's cache."""

    keys: torch.Tensor
    """Float32 ``[heads, positions, head_dim]``."""
    values: torch.Tensor
    dtype: str
    """As it was stored."""
    disagreeing: list[tuple[int, int, int]]
    """Ranks that should hold the same and do not, as :func:`disagreeing` says."""
    other_scales: list[tuple[int, int, str]]
    """The same of the scales of an 8-bit cache, as :func:`disagreeing_scales` says."""


@dataclass(frozen=True, eq=False)
class Cache:
    """The cache of one request of a capture; its layers are read one at a time."""

    capture: Capture
    record: CacheRecord
    dp: int

    def layer(self, index: int) -> Layer:
        """Read one layer from all ranks; raises ``CaptureError`` when one is missing, ``LayoutError`` when they do not
        make one cache.
        """
        request, ranks = self.record.request, self.capture.run.ranks
        there = self.capture.cache_ranks(request, index, dp=self.dp)
        if there != tuple(range(ranks)):
            raise CaptureError(
                f"{self.capture.folder}: layer {index} of the cache of request {request!r} was written by ranks "
                f"{[*there]} of {ranks}; a cache is whole with all of them"
            )
        held = [self.capture.load_pages(request, index, rank, dp=self.dp) for rank in there]
        names = {"k_scale", "v_scale"} & {name for tensors in held for name in tensors}
        for name in sorted(names):
            scaled = [rank for rank, tensors in enumerate(held) if name in tensors]
            if len(scaled) < ranks or len(names) < 2:
                raise LayoutError(
                    f"request {request!r}, layer {index}: only ranks {scaled} have {name}; "
                    "k_scale and v_scale of all ranks, or none, work"
                )
        pages = [tensors["pages"] for tensors in held]
        scales: list[Scales] | None = [(item["k_scale"], item["v_scale"]) for item in held] if names else None
        keys, values = contiguous(self.record, pages, scales)
        dtype = str(pages[0].dtype).removeprefix("torch.")
        other_scales = [] if scales is None else disagreeing_scales(self.record, scales)
        return Layer(keys, values, dtype, disagreeing(self.record, pages), other_scales)


@dataclass(frozen=True, eq=False)
class Pair:
    """A request under test, what it is held against, and how many leading tokens they share."""

    test: Cache
    reference: Cache
    baseline: Cache | None
    length: int

    @property
    def request(self) -> str:
        """The id of the request under test."""
        return self.test.record.request

    @property
    def sides(self) -> dict[str, Cache]:
        """Its caches by role."""
        named = {"test": self.test, "reference": self.reference, "baseline": self.baseline}
        return {side: cache for side, cache in named.items() if cache is not None}


def caches_of(capture: Capture) -> list[Cache]:
    """Every cache of a capture; raises ``CaptureError`` when there is none."""
    found = [Cache(capture, record, dp) for dp in capture.replicas for record in capture.caches(dp)]
    if not found:
        raise CaptureError(f'{capture.folder} holds no KV cache; capture with {{"kv": true}}')
    for cache in found:
        if not cache.record.token_ids or cache.record.num_layers < 1:
            raise CaptureError(f"{capture.folder}: the cache of request {cache.record.request!r} is empty")
    return found


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def pair_up(
    tests: Sequence[Cache], references: Sequence[Cache], baselines: Sequence[Cache] = ()
) -> tuple[list[Pair], list[Cache], list[Cache]]:
    """Pairs by the longest common prefix of their tokens, and what is left over of tests and of references.

    Longest prefixes first, of equal ones those that end together; each cache is used once. Raises ``LayoutError`` when
    a pair's models have other layers, heads or head size.
    """
    chosen = _match(tests, references)
    if baselines:
        of_baseline = _match([tests[i] for i in chosen], baselines)
        truths = {list(chosen)[i]: baselines[j] for i, j in of_baseline.items()}
    else:
        truths = {}
    pairs = []
    for i in sorted(chosen):
        test, reference, baseline = tests[i], references[chosen[i]], truths.get(i)
        others = [item for item in (reference, baseline) if item is not None]
        for other in others:
            _check_same(test.record, other.record)
        lengths = [common_prefix(test.record.token_ids, other.record.token_ids) for other in others]
        pairs.append(Pair(test, reference, baseline, min(lengths)))
    if baselines and (without := [pair.request for pair in pairs if pair.baseline is None]):
        raise AccuracyError(f"the baseline has no cache with the tokens of request {without[0]!r}")
    left = [cache for i, cache in enumerate(tests) if i not in chosen]
    unused = [cache for j, cache in enumerate(references) if j not in chosen.values()]
    return pairs, left, unused


def _match(ours: Sequence[Cache], theirs: Sequence[Cache]) -> dict[int, int]:
    scored = []
    for i, a in enumerate(ours):
        for j, b in enumerate(theirs):
            length = common_prefix(a.record.token_ids, b.record.token_ids)
            spare = len(a.record.token_ids) + len(b.record.token_ids) - 2 * length
            if length:
                scored.append((-length, spare, i, j))
    chosen: dict[int, int] = {}
    for _, _, i, j in sorted(scored):
        if i not in chosen and j not in chosen.values():
            chosen[i] = j
    return chosen


def _check_same(test: CacheRecord, other: CacheRecord) -> None:
    for name in ("num_layers", "num_heads", "head_dim"):
        ours, theirs = getattr(test, name), getattr(other, name)
        if ours != theirs:
            raise LayoutError(
                f"request {test.request!r} has {name}={ours}, request {other.request!r} it is held against "
                f"{name}={theirs}: captures of different models"
            )
