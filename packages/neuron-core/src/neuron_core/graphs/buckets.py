# SPDX-License-Identifier: Apache-2.0
"""The shapes a server compiles: one ``Bucket`` per graph and one ``BucketPlan`` that owns them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from neuron_core.errors import ConfigError, UncompiledShapeError

__all__ = ["MIN_DEFAULT_PREFILL_TOKENS", "Bucket", "BucketPlan", "Phase", "round_up"]

MIN_DEFAULT_PREFILL_TOKENS = 128
"""Smallest prefill bucket of a default plan, in tokens."""

DEFAULT_MAX_PREFILL_SEQS = 8


class Phase(StrEnum):
    """What a graph computes: prompt tokens, one token per request, or logits of given hidden states."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOGITS = "logits"


@dataclass(frozen=True, order=True)
class Bucket:
    """The static shape of one graph.

    ``num_tokens`` is T of every per-token tensor and ``num_seqs`` is R of every per-request tensor; a decode
    bucket has T == R, a logits bucket takes ``hidden_states [num_tokens, hidden]``. ``context_len`` is the
    number of tokens the block table addresses, so the table is ``context_len // block_size`` wide.
    """

    phase: Phase
    num_tokens: int
    num_seqs: int
    context_len: int

    @property
    def name(self) -> str:
        """The label used in logs, metrics and errors: ``prefill_s512``, ``decode_b4``, ``logits_s64``."""
        if self.phase is Phase.DECODE:
            return f"{self.phase.value}_b{self.num_seqs}"
        return f"{self.phase.value}_s{self.num_tokens}"


@dataclass(frozen=True)
class BucketPlan:
    """Every bucket of one server, and the only place a shape comes from.

    Warm-up compiles ``all()``; the runner asks ``prefill`` and ``decode`` for the cheapest bucket that holds
    a step. Build it with ``from_limits``; constructing it directly checks the same rules and raises
    ``ConfigError``.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_tokens: tuple[int, ...]
    decode_seqs: tuple[int, ...]
    max_prefill_seqs: int
    logits_tokens: int = 64
    token_multiple: int = 1

    def __post_init__(self) -> None:
        """Check the limits and both bucket lists."""
        for setting in (
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_prefill_seqs",
            "logits_tokens",
            "token_multiple",
        ):
            _require_positive(setting, getattr(self, setting))
        if self.max_num_batched_tokens < self.max_num_seqs:
            hint = f"a decode step holds max_num_seqs={self.max_num_seqs} tokens; use at least that"
            raise ConfigError("max_num_batched_tokens", self.max_num_batched_tokens, hint)
        if self.max_prefill_seqs > self.max_num_seqs:
            hint = f"must not exceed max_num_seqs; use {self.max_num_seqs} or less"
            raise ConfigError("max_prefill_seqs", self.max_prefill_seqs, hint)
        _check_list("decode_buckets", self.decode_seqs, _default_decode(self.max_num_seqs), "max_num_seqs")
        default = _default_prefill(self.max_model_len, self.max_num_batched_tokens, self.token_multiple)
        source = "the smaller of max_num_batched_tokens and max_model_len"
        _check_list("prefill_buckets", self.prefill_tokens, default, source)
        for size in self.prefill_tokens:
            if size % self.token_multiple:
                nearest = round_up(size, self.token_multiple)
                hint = f"{size} is not a multiple of {self.token_multiple} (ranks share a prompt's tokens); "
                raise ConfigError("prefill_buckets", list(self.prefill_tokens), hint + f"{nearest} works")

    @classmethod
    def from_limits(
        cls,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        prefill_buckets: Sequence[int] | None = None,
        decode_buckets: Sequence[int] | None = None,
        max_prefill_seqs: int | None = None,
        token_multiple: int = 1,
    ) -> BucketPlan:
        """The plan for a server's limits; lists left out become powers of two that end at the maximum.

        ``token_multiple`` is what every prefill bucket must divide by: the tensor-parallel size under
        sequence parallelism. Raises ``ConfigError`` naming the setting, its value and a value that works.
        """
        _require_positive("max_model_len", max_model_len)
        _require_positive("max_num_seqs", max_num_seqs)
        _require_positive("max_num_batched_tokens", max_num_batched_tokens)
        _require_positive("token_multiple", token_multiple)
        if prefill_buckets is None:
            prefill_buckets = _default_prefill(max_model_len, max_num_batched_tokens, token_multiple)
        if decode_buckets is None:
            decode_buckets = _default_decode(max_num_seqs)
        return cls(
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_tokens=tuple(prefill_buckets),
            decode_seqs=tuple(decode_buckets),
            max_prefill_seqs=(
                min(DEFAULT_MAX_PREFILL_SEQS, max_num_seqs) if max_prefill_seqs is None else max_prefill_seqs
            ),
            token_multiple=token_multiple,
        )

    @property
    def context_len(self) -> int:
        """Tokens a block table addresses: ``max_model_len`` rounded up to whole blocks."""
        return round_up(self.max_model_len, self.block_size)

    @property
    def max_prefill_tokens(self) -> int:
        """Tokens of the largest prefill bucket; a longer prompt is prefilled in several steps."""
        return self.prefill_tokens[-1]

    def prefill(self, num_tokens: int, num_seqs: int) -> Bucket:
        """The cheapest prefill bucket for ``num_tokens`` new tokens of ``num_seqs`` requests together.

        Raises ``UncompiledShapeError`` when no bucket holds them.
        """
        if num_seqs < 1 or num_seqs > self.max_prefill_seqs:
            limit = f"1 to {self.max_prefill_seqs} requests (max_prefill_seqs)"
            raise UncompiledShapeError(f"prefill of {num_seqs} requests: compiled for {limit}")
        size = _cheapest(num_tokens, self.prefill_tokens)
        if size is None:
            limit = f"1 to {self.max_prefill_tokens} tokens (prefill buckets {list(self.prefill_tokens)})"
            raise UncompiledShapeError(f"prefill of {num_tokens} tokens: compiled for {limit}")
        return Bucket(Phase.PREFILL, size, self.max_prefill_seqs, self.context_len)

    def decode(self, num_seqs: int) -> Bucket:
        """The cheapest decode bucket for ``num_seqs`` requests of one token each.

        Raises ``UncompiledShapeError`` when no bucket holds them.
        """
        size = _cheapest(num_seqs, self.decode_seqs)
        if size is None:
            limit = f"1 to {self.max_num_seqs} requests (decode buckets {list(self.decode_seqs)})"
            raise UncompiledShapeError(f"decode of {num_seqs} requests: compiled for {limit}")
        return Bucket(Phase.DECODE, size, size, self.context_len)

    def logits(self) -> Bucket:
        """The bucket that turns ``logits_tokens`` hidden states into logits (prompt log-probabilities)."""
        return Bucket(Phase.LOGITS, self.logits_tokens, self.logits_tokens, self.context_len)

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket once, the one with most tokens first, so that the longest compile starts first."""
        buckets = [
            Bucket(Phase.PREFILL, n, self.max_prefill_seqs, self.context_len) for n in self.prefill_tokens
        ]
        buckets += [Bucket(Phase.DECODE, n, n, self.context_len) for n in self.decode_seqs]
        buckets.append(self.logits())
        return tuple(sorted(buckets, key=lambda b: (-b.num_tokens, b.phase.value)))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def _default_prefill(max_model_len: int, max_num_batched_tokens: int, multiple: int) -> tuple[int, ...]:
    """Powers of two up to what one step may schedule, which never exceeds a whole prompt."""
    largest = min(max_num_batched_tokens, round_up(max_model_len, multiple))
    if largest % multiple:
        works = max(largest - largest % multiple, multiple)
        hint = f"must be a multiple of {multiple} (ranks share a prompt's tokens); {works} works"
        raise ConfigError("max_num_batched_tokens", max_num_batched_tokens, hint)
    return _doubling(MIN_DEFAULT_PREFILL_TOKENS, largest, multiple)


def _default_decode(max_num_seqs: int) -> tuple[int, ...]:
    return _doubling(1, max_num_seqs, 1)


def _doubling(first: int, last: int, multiple: int) -> tuple[int, ...]:
    sizes = []
    size = first
    while round_up(size, multiple) < last:
        sizes.append(round_up(size, multiple))
        size *= 2
    return (*dict.fromkeys(sizes), last)


def _cheapest(needed: int, sizes: tuple[int, ...]) -> int | None:
    if needed < 1:
        return None
    return next((size for size in sizes if size >= needed), None)


def _check_list(setting: str, sizes: tuple[int, ...], default: tuple[int, ...], source: str) -> None:
    """Check one bucket list; ``default`` is a list that works and ends at the required maximum."""
    problem = ""
    if not sizes:
        problem = "must not be empty"
    elif any(not _is_positive(size) for size in sizes):
        problem = "must hold whole numbers of at least 1"
    elif any(later <= earlier for earlier, later in pairwise(sizes)):
        problem = "must be strictly ascending"
    elif sizes[-1] != default[-1]:
        problem = f"must end exactly at {default[-1]} ({source})"
    if problem:
        raise ConfigError(setting, list(sizes), f"{problem}; {list(default)} works")


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require_positive(setting: str, value: object) -> None:
    if not _is_positive(value):
        raise ConfigError(setting, value, "must be a whole number of at least 1; 1 works")
