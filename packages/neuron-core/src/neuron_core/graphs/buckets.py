# SPDX-License-Identifier: Apache-2.0
"""The shapes a server compiles: one ``Bucket`` per graph and one ``BucketPlan`` that owns them all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from neuron_core.errors import ConfigError, UncompiledShapeError

__all__ = [
    "CONTEXT_MULTIPLE",
    "MAX_DEFAULT_DECODE_BUCKETS",
    "MIN_DEFAULT_CONTEXT",
    "MIN_DEFAULT_PREFILL_TOKENS",
    "Bucket",
    "BucketPlan",
    "Phase",
    "round_up",
]

MIN_DEFAULT_PREFILL_TOKENS = 64
"""Smallest prefill bucket of a default plan, in tokens."""

MIN_DEFAULT_CONTEXT = 512
"""Smallest decode context of a default plan, in tokens."""

MAX_DEFAULT_DECODE_BUCKETS = 48
"""Most decode buckets of a plan with default contexts, unless there are more request sizes: each is a compile."""

CONTEXT_MULTIPLE = 128
"""What a decode context divides by, in tokens, wherever a request can be longer than that."""

DEFAULT_MAX_PREFILL_SEQS = 8
_HALF_STEPS_FROM = 128


class Phase(StrEnum):
    """What a graph computes: prompt tokens, one token per request, logits of given hidden states, or the hidden
    states of whole texts.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    LOGITS = "logits"
    EMBED = "embed"


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
    names_context: bool = field(default=False, compare=False)
    """Whether ``name`` tells the context, which it need not where a plan has only one."""

    @property
    def cost(self) -> int:
        """What a step in this bucket is taken to cost: tokens times the context each of them may read."""
        return self.num_tokens * self.context_len

    @property
    def name(self) -> str:
        """The label in logs, metrics and errors: ``prefill_s512``, ``decode_b4``, ``decode_b4_c1024``,
        ``logits_s64``, ``embed_s512``.
        """
        size = f"b{self.num_seqs}" if self.phase is Phase.DECODE else f"s{self.num_tokens}"
        context = f"_c{self.context_len}" if self.names_context else ""
        return f"{self.phase.value}_{size}{context}"

    def holds(self, num_tokens: int, num_seqs: int, context_len: int) -> bool:
        """Whether a step of that many tokens and requests, the longest of ``context_len`` tokens, fits."""
        return num_tokens <= self.num_tokens and num_seqs <= self.num_seqs and context_len <= self.context_len


@dataclass(frozen=True)
class BucketPlan:
    """Every bucket of one server, and the only place a shape comes from.

    Warm-up compiles ``all()``; the runner asks ``prefill`` and ``decode`` for the cheapest bucket that holds
    a step, by ``Bucket.cost``. ``decode_contexts`` are the decode contexts shorter than the full one, which is
    always there. A ``pooling`` plan is that of a server that embeds: its prefill buckets have phase ``EMBED``, and
    there are no others. Build a plan with ``from_limits``; constructing it directly checks the same rules and
    raises ``ConfigError``.
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
    decode_contexts: tuple[int, ...] = ()
    pooling: bool = False

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
        self._check_decode()
        default = _default_prefill(self.max_model_len, self.max_num_batched_tokens, self.token_multiple)
        source = "the smaller of max_num_batched_tokens and max_model_len"
        _check_list("prefill_buckets", self.prefill_tokens, default, source)
        for size in self.prefill_tokens:
            if size % self.token_multiple:
                nearest = round_up(size, self.token_multiple)
                hint = f"{size} is not a multiple of {self.token_multiple} (ranks share a prompt's tokens); "
                raise ConfigError("prefill_buckets", list(self.prefill_tokens), hint + f"{nearest} works")

    def _check_decode(self) -> None:
        if self.pooling:
            for setting, sizes in (
                ("decode_buckets", self.decode_seqs),
                ("decode_context_length_buckets", self.decode_contexts),
            ):
                if sizes:
                    hint = "a pooling model decodes nothing; leave it out"
                    raise ConfigError(setting, list(sizes), hint)
            return
        _check_list("decode_buckets", self.decode_seqs, _default_decode(self.max_num_seqs), "max_num_seqs")
        default = _default_contexts(self.max_model_len, self.block_size, len(self.decode_seqs))
        _check_contexts(self.decode_contexts, self.max_model_len, self.block_size, default)

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
        decode_context_length_buckets: Sequence[int] | None = None,
        max_prefill_seqs: int | None = None,
        token_multiple: int = 1,
        pooling: bool = False,
    ) -> BucketPlan:
        """The plan for a server's limits; lists left out become default ones (see ``docs/buckets.md``).

        ``decode_context_length_buckets`` are contexts below ``max_model_len``, whose own is always added;
        an empty list leaves that one alone. ``token_multiple`` is what every prefill bucket must divide by:
        the tensor-parallel size under sequence parallelism. Raises ``ConfigError`` naming the setting, its
        value and a value that works.
        """
        _require_positive("block_size", block_size)
        _require_positive("max_model_len", max_model_len)
        _require_positive("max_num_seqs", max_num_seqs)
        _require_positive("max_num_batched_tokens", max_num_batched_tokens)
        _require_positive("token_multiple", token_multiple)
        if prefill_buckets is None:
            prefill_buckets = _default_prefill(max_model_len, max_num_batched_tokens, token_multiple)
        if decode_buckets is None:
            decode_buckets = () if pooling else _default_decode(max_num_seqs)
        if decode_context_length_buckets is None and pooling:
            decode_context_length_buckets = ()
        elif decode_context_length_buckets is None:
            decode_context_length_buckets = _default_contexts(max_model_len, block_size, len(decode_buckets))
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
            decode_contexts=tuple(decode_context_length_buckets),
            pooling=pooling,
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
        bucket = _cheapest(self._prefill, num_tokens, num_seqs, self.context_len)
        if bucket is None:
            limit = f"1 to {self.max_prefill_tokens} tokens (prefill buckets {list(self.prefill_tokens)})"
            raise UncompiledShapeError(f"prefill of {num_tokens} tokens: compiled for {limit}")
        return bucket

    def decode(self, num_seqs: int, context_len: int | None = None) -> Bucket:
        """The cheapest decode bucket for ``num_seqs`` requests of one token each.

        ``context_len`` is the number of tokens of the longest of them, the new one included; None stands for
        the longest there can be. Raises ``UncompiledShapeError`` when no bucket holds them.
        """
        longest = self.context_len if context_len is None else context_len
        bucket = _cheapest(self._decode, num_seqs, num_seqs, longest)
        if bucket is not None:
            return bucket
        if 1 <= num_seqs <= self.max_num_seqs:
            limit = f"1 to {self.context_len} tokens (max_model_len={self.max_model_len})"
            raise UncompiledShapeError(f"decode of a context of {longest} tokens: compiled for {limit}")
        limit = f"1 to {self.max_num_seqs} requests (decode buckets {list(self.decode_seqs)})"
        raise UncompiledShapeError(f"decode of {num_seqs} requests: compiled for {limit}")

    def logits(self) -> Bucket:
        """The bucket that turns ``logits_tokens`` hidden states into logits (prompt log-probabilities)."""
        return Bucket(Phase.LOGITS, self.logits_tokens, self.logits_tokens, self.context_len)

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket once, the one with most tokens first, so that the longest compile starts first."""
        others = () if self.pooling else (*self._decode, self.logits())
        buckets = (*self._prefill, *others)
        return tuple(sorted(buckets, key=lambda b: (-b.num_tokens, b.phase.value, -b.context_len)))

    @cached_property
    def _prefill(self) -> tuple[Bucket, ...]:
        """The prefill buckets, the cheapest first."""
        phase = Phase.EMBED if self.pooling else Phase.PREFILL
        return _by_cost(
            Bucket(phase, size, self.max_prefill_seqs, self.context_len) for size in self.prefill_tokens
        )

    @cached_property
    def _decode(self) -> tuple[Bucket, ...]:
        """The decode buckets, the cheapest first."""
        contexts = (*self.decode_contexts, self.context_len)
        return _by_cost(
            Bucket(Phase.DECODE, size, size, context, names_context=len(contexts) > 1)
            for size in self.decode_seqs
            for context in contexts
        )


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def _default_prefill(max_model_len: int, max_num_batched_tokens: int, multiple: int) -> tuple[int, ...]:
    """Powers of two and what lies half-way between, up to what one step may schedule.

    That never exceeds a whole prompt. Powers of two alone pad a mix of chat prompts by more than a third.
    """
    largest = min(max_num_batched_tokens, round_up(max_model_len, multiple))
    if largest % multiple:
        works = max(largest - largest % multiple, multiple)
        hint = f"must be a multiple of {multiple} (ranks share a prompt's tokens); {works} works"
        raise ConfigError("max_num_batched_tokens", max_num_batched_tokens, hint)
    sizes: list[int] = []
    size = MIN_DEFAULT_PREFILL_TOKENS
    while size < largest:
        sizes += [size, size * 3 // 2] if size >= _HALF_STEPS_FROM else [size]
        size *= 2
    return _ending_at(largest, sizes, multiple)


def _default_decode(max_num_seqs: int) -> tuple[int, ...]:
    return _ending_at(max_num_seqs, _powers(2, 1, max_num_seqs), 1)


def _default_contexts(max_model_len: int, block_size: int, num_sizes: int) -> tuple[int, ...]:
    """Each the same power of two times the one before: twice, or the least that keeps the buckets few."""
    multiple = _context_multiple(max_model_len, block_size)
    # Beside the full context; a plan refuses an empty list of sizes by its own name.
    most = MAX_DEFAULT_DECODE_BUCKETS // max(1, num_sizes) - 1
    contexts: tuple[int, ...] = ()
    factor = 2
    while most > 0:
        sizes = _powers(factor, MIN_DEFAULT_CONTEXT, max_model_len)
        contexts = _ending_at(max_model_len, sizes, multiple)[:-1]
        if len(contexts) <= most:
            break
        factor *= 2
    return contexts


def _context_multiple(max_model_len: int, block_size: int) -> int:
    return block_size if max_model_len <= CONTEXT_MULTIPLE else math.lcm(CONTEXT_MULTIPLE, block_size)


def _powers(factor: int, first: int, limit: int) -> list[int]:
    """``first`` times 1, ``factor``, its square, … while below ``limit``."""
    sizes = []
    while first < limit:
        sizes.append(first)
        first *= factor
    return sizes


def _ending_at(last: int, sizes: Iterable[int], multiple: int) -> tuple[int, ...]:
    """``sizes`` rounded up to a multiple, without equals and what reaches ``last``, and ``last``."""
    rounded = dict.fromkeys(round_up(size, multiple) for size in sizes)
    return (*(size for size in rounded if size < last), last)


def _by_cost(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    return tuple(sorted(buckets, key=lambda bucket: (bucket.cost, bucket.num_tokens)))


def _cheapest(by_cost: tuple[Bucket, ...], num_tokens: int, num_seqs: int, context_len: int) -> Bucket | None:
    if min(num_tokens, num_seqs, context_len) < 1:
        return None
    return next((bucket for bucket in by_cost if bucket.holds(num_tokens, num_seqs, context_len)), None)


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


def _check_contexts(
    sizes: tuple[int, ...], max_model_len: int, block_size: int, default: tuple[int, ...]
) -> None:
    """Check the decode contexts below the full one; there may be none, and ``default`` works."""
    multiple = _context_multiple(max_model_len, block_size)
    problem = ""
    if any(not _is_positive(size) for size in sizes):
        problem = "must hold whole numbers of at least 1"
    elif any(later <= earlier for earlier, later in pairwise(sizes)):
        problem = "must be strictly ascending"
    elif sizes and sizes[-1] >= max_model_len:
        problem = f"must stay below {max_model_len} (max_model_len), whose context is always there"
    elif misaligned := [size for size in sizes if size % multiple]:
        whole = f"the block size, {block_size}"
        reason = whole if multiple == block_size else f"{CONTEXT_MULTIPLE} and {whole}"
        problem = f"{misaligned[0]} is not a multiple of {multiple} ({reason})"
    if problem:
        works = [size for size in dict.fromkeys(_aligned(sizes, multiple)) if size < max_model_len]
        works = works or list(default)
        raise ConfigError("decode_context_length_buckets", list(sizes), f"{problem}; {works} works")


def _aligned(sizes: tuple[int, ...], multiple: int) -> list[int]:
    """What was asked for, in order and rounded up to what is allowed."""
    return sorted(round_up(size, multiple) for size in sizes if _is_positive(size))


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require_positive(setting: str, value: object) -> None:
    if not _is_positive(value):
        raise ConfigError(setting, value, "must be a whole number of at least 1; 1 works")
