# SPDX-License-Identifier: Apache-2.0
"""A plan holds every step the limits allow, in the cheapest bucket, and nothing else."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_core.errors import ConfigError, UncompiledShapeError
from neuron_core.graphs.buckets import MAX_DEFAULT_DECODE_BUCKETS, Bucket, BucketPlan, Phase

LIMITS: dict[str, Any] = {
    "max_model_len": 1000,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 2048,
    "block_size": 16,
}


@st.composite
def plans(draw: st.DrawFn) -> BucketPlan:
    """A plan with default or random lists for random limits."""
    multiple = draw(st.integers(1, 4))
    max_num_seqs = draw(st.integers(1, 40))
    max_model_len = draw(st.integers(1, 3000))
    batched = -(-draw(st.integers(max_num_seqs, 4000)) // multiple) * multiple
    largest = min(batched, -(-max_model_len // multiple) * multiple)
    steps = st.sets(st.integers(1, max(1, largest // multiple - 1)), max_size=6)
    custom = sorted({step * multiple for step in draw(steps)} | {largest})
    decode = sorted({n for n in draw(st.sets(st.integers(1, 40), max_size=5)) if n < max_num_seqs})
    block_size = draw(st.sampled_from([1, 16, 32]))
    unit = 128 if max_model_len > 128 else block_size
    contexts = sorted({unit * n for n in draw(st.sets(st.integers(1, 24), max_size=5))})
    contexts = [size for size in contexts if size < max_model_len]
    return BucketPlan.from_limits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=block_size,
        prefill_buckets=draw(st.sampled_from([None, custom])),
        decode_buckets=draw(st.sampled_from([None, [*decode, max_num_seqs]])),
        decode_context_length_buckets=draw(st.sampled_from([None, [], contexts])),
        max_prefill_seqs=draw(st.none() | st.integers(1, max_num_seqs)),
        token_multiple=multiple,
    )


@given(plan=plans(), tokens=st.integers(-1, 4100), seqs=st.integers(-1, 45), context=st.integers(-1, 3200))
def test_the_cheapest_fitting_bucket_is_chosen_or_none_fits(
    plan: BucketPlan, tokens: int, seqs: int, context: int
) -> None:
    def cheapest(phase: Phase, context: int) -> Bucket | None:
        fitting = [
            bucket
            for bucket in plan.all()
            if bucket.phase is phase
            and (bucket.num_tokens >= tokens and bucket.num_seqs >= seqs and bucket.context_len >= context)
        ]
        return min(fitting, key=lambda bucket: bucket.num_tokens * bucket.context_len, default=None)

    expected = cheapest(Phase.PREFILL, 1) if tokens >= 1 and seqs >= 1 else None
    if expected is None:
        with pytest.raises(UncompiledShapeError, match="prefill of"):
            plan.prefill(tokens, seqs)
    else:
        assert plan.prefill(tokens, seqs) == expected
    tokens = seqs
    expected = cheapest(Phase.DECODE, context) if seqs >= 1 and context >= 1 else None
    if expected is None:
        fits = 1 <= seqs <= plan.max_num_seqs
        what = f"a context of {context} tokens" if fits else f"{seqs} requests"
        with pytest.raises(UncompiledShapeError, match=f"decode of {what}"):
            plan.decode(seqs, context)
    else:
        assert plan.decode(seqs, context) == expected
        assert plan.decode(seqs) == cheapest(Phase.DECODE, plan.context_len)


@given(plan=plans())
def test_every_schedulable_step_has_a_bucket_and_buckets_are_unique(plan: BucketPlan) -> None:
    for seqs in range(1, plan.max_num_seqs + 1):
        for context in {1, plan.max_model_len, *plan.decode_contexts, *(c + 1 for c in plan.decode_contexts)}:
            assert plan.decode(seqs, context) in plan.all()
    longest = min(plan.max_num_batched_tokens, plan.max_model_len)
    for tokens in {1, longest, *(n for n in plan.prefill_tokens if n <= longest)}:
        for seqs in range(1, plan.max_prefill_seqs + 1):
            assert plan.prefill(tokens, seqs) in plan.all()
    names = [bucket.name for bucket in plan.all()]
    assert len(set(names)) == len(names)
    sizes = [bucket.num_tokens for bucket in plan.all()]
    assert sizes == sorted(sizes, reverse=True)
    for bucket in plan.all():
        assert bucket.context_len % plan.block_size == 0
        is_short = bucket.phase is Phase.DECODE and bucket.context_len in plan.decode_contexts
        assert is_short or plan.max_model_len <= bucket.context_len < plan.max_model_len + plan.block_size
        assert bucket.phase is not Phase.DECODE or bucket.num_tokens == bucket.num_seqs
        assert bucket.phase is not Phase.PREFILL or bucket.num_tokens % plan.token_multiple == 0


@pytest.mark.parametrize(
    ("limits", "prefill", "decode"),
    [
        ({}, (64, 128, 192, 256, 384, 512, 768, 1000), (1, 2, 4, 6)),
        (
            {"max_model_len": 1024, "max_num_seqs": 8},
            (64, 128, 192, 256, 384, 512, 768, 1024),
            (1, 2, 4, 8),
        ),
        ({"max_num_batched_tokens": 512}, (64, 128, 192, 256, 384, 512), (1, 2, 4, 6)),
        ({"max_model_len": 100, "max_num_seqs": 1}, (64, 100), (1,)),
        ({"max_model_len": 50, "max_num_seqs": 1}, (50,), (1,)),
        ({"token_multiple": 3, "max_num_batched_tokens": 300}, (66, 129, 192, 258, 300), (1, 2, 4, 6)),
        ({"token_multiple": 16}, (64, 128, 192, 256, 384, 512, 768, 1008), (1, 2, 4, 6)),
    ],
)
def test_default_lists(limits: dict[str, int], prefill: tuple[int, ...], decode: tuple[int, ...]) -> None:
    plan = BucketPlan.from_limits(**LIMITS | limits)
    assert plan.prefill_tokens == prefill
    assert plan.decode_seqs == decode
    assert plan.max_prefill_seqs == min(8, plan.max_num_seqs)


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "contexts"),
    [
        (512, 16, ()),
        (513, 16, (512,)),
        (4096, 16, (512, 1024, 2048)),
        (5000, 16, (512, 1024, 2048, 4096)),
        (4096, 48, (768, 1152, 2304)),  # whole blocks of 48 that are whole 128s: multiples of 384
        (131072, 16, (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)),
    ],
)
def test_default_contexts(max_model_len: int, block_size: int, contexts: tuple[int, ...]) -> None:
    limits = LIMITS | {"max_model_len": max_model_len, "block_size": block_size}
    assert BucketPlan.from_limits(**limits).decode_contexts == contexts
    assert BucketPlan.from_limits(**limits, decode_context_length_buckets=[]).decode_contexts == ()


def contexts_by(factor: int, max_model_len: int, unit: int) -> tuple[int, ...]:
    """512 times each power of ``factor``, rounded up to ``unit``, as long as that is below ``max_model_len``."""
    sizes = {-(-512 * factor**power // unit) * unit for power in range(20)}
    return tuple(sorted(size for size in sizes if size < max_model_len))


@given(
    max_model_len=st.integers(129, 2**20) | st.sampled_from([4096, 8192, 32768, 131072, 2**20]),
    max_num_seqs=st.integers(1, 1024) | st.sampled_from([16, 64, 256, 1024]),
    block_size=st.sampled_from([16, 32, 48, 128]),
    custom=st.sets(st.integers(1, 1023), max_size=60),
    others=st.tuples(st.integers(1024, 4096), st.integers(1, 2)),
)
def test_default_contexts_stay_as_close_as_the_number_of_decode_buckets_allows(
    max_model_len: int, max_num_seqs: int, block_size: int, custom: set[int], others: tuple[int, int]
) -> None:
    lists = [[*sorted(n for n in custom if n < max_num_seqs), max_num_seqs], None]
    limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "block_size": block_size}
    for decode_buckets in lists:
        plan = BucketPlan.from_limits(**limits, max_num_batched_tokens=2048, decode_buckets=decode_buckets)
        num_decode = sum(bucket.phase is Phase.DECODE for bucket in plan.all())
        sizes = len(plan.decode_seqs)
        assert num_decode == sizes * (len(plan.decode_contexts) + 1)
        assert num_decode <= max(MAX_DEFAULT_DECODE_BUCKETS, sizes)
        # The closest of all steps that leave so few buckets, which for a short model is twice.
        by_factor = [
            contexts_by(2**power, max_model_len, math.lcm(128, block_size)) for power in range(1, 21)
        ]
        few = [found for found in by_factor if sizes * (len(found) + 1) <= MAX_DEFAULT_DECODE_BUCKETS]
        assert plan.decode_contexts == (few[0] if few else ())
        budget, multiple = others
        same = BucketPlan.from_limits(
            **limits,
            max_num_batched_tokens=budget * multiple,
            token_multiple=multiple,
            max_prefill_seqs=1,
            decode_buckets=decode_buckets,
        )
        assert same.decode_contexts == plan.decode_contexts


def test_a_context_of_whole_blocks_is_allowed_where_no_request_reaches_128_tokens() -> None:
    limits = LIMITS | {"max_model_len": 100, "decode_context_length_buckets": [32, 48]}
    plan = BucketPlan.from_limits(**limits)
    assert [plan.decode(1, context).context_len for context in (32, 33, 49, 100)] == [32, 48, 112, 112]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill_buckets": [256, 128, 1000]}, r"prefill_buckets=\[256, 128, 1000\]: .*ascending"),
        ({"prefill_buckets": [128, 128, 1000]}, "strictly ascending"),
        ({"prefill_buckets": [128, 512]}, r"end exactly at 1000.*\[64, 128, 192, .*, 1000\] works"),
        ({"prefill_buckets": [128, 2048]}, "end exactly at 1000"),
        ({"prefill_buckets": []}, "must not be empty"),
        ({"prefill_buckets": [0, 1000]}, "at least 1"),
        ({"prefill_buckets": [12.5, 1000]}, "whole numbers"),
        ({"prefill_buckets": [127, 1000], "token_multiple": 2}, "127 is not a multiple of 2.*128 works"),
        ({"decode_buckets": [1, 4]}, r"end exactly at 6 \(max_num_seqs\); \[1, 2, 4, 6\] works"),
        ({"decode_buckets": [1, 8]}, "end exactly at 6"),
        ({"decode_buckets": [4, 1, 6]}, "decode_buckets"),
        ({"decode_buckets": []}, r"decode_buckets=\[\]: must not be empty; \[1, 2, 4, 6\] works"),
        ({"decode_context_length_buckets": [512, 256]}, r"\[512, 256\]: .*ascending; \[256, 512\] works"),
        ({"decode_context_length_buckets": [256, 256]}, r"strictly ascending; \[256\] works"),
        (
            {"decode_context_length_buckets": [256, 1000]},
            r"\[256, 1000\]: must stay below 1000 \(max_model_len\).*; \[256\] works",
        ),
        ({"decode_context_length_buckets": [4096]}, r"must stay below 1000.*; \[512\] works"),
        (
            {"decode_context_length_buckets": [192]},
            r"192 is not a multiple of 128 \(128 and the block size, 16\); \[256\] works",
        ),
        (
            {"decode_context_length_buckets": [256], "block_size": 48},
            r"256 is not a multiple of 384 \(128 and the block size, 48\); \[384\] works",
        ),
        (
            {"decode_context_length_buckets": [40], "max_model_len": 100},
            r"40 is not a multiple of 16 \(the block size, 16\); \[48\] works",
        ),
        ({"decode_context_length_buckets": [0, 512]}, r"at least 1; \[512\] works"),
        ({"decode_context_length_buckets": [512.0]}, r"whole numbers"),
        ({"max_num_batched_tokens": 511, "token_multiple": 2}, "max_num_batched_tokens=511.*510 works"),
        ({"max_num_batched_tokens": 4}, "max_num_seqs=6"),
        ({"max_prefill_seqs": 7}, "max_prefill_seqs=7.*6 or less"),
        ({"max_prefill_seqs": 0}, "max_prefill_seqs=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"max_model_len": -5}, "max_model_len=-5"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"token_multiple": 0}, "token_multiple=0"),
    ],
)
def test_impossible_plans_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BucketPlan.from_limits(**LIMITS | change)


def test_names_are_the_labels_of_the_metrics() -> None:
    plan = BucketPlan.from_limits(**LIMITS)
    assert plan.prefill(300, 1).name == "prefill_s384"
    assert plan.decode(3, 512).name == "decode_b4_c512"
    assert plan.decode(3, 513).name == plan.decode(3).name == "decode_b4_c1008"
    assert plan.logits().name == "logits_s64"
    one_context = BucketPlan.from_limits(**LIMITS, decode_context_length_buckets=[])
    assert one_context.decode(3, 5).name == "decode_b4"
    assert one_context.decode(3) == plan.decode(3)  # the same shape, and so the same graph


def test_an_uncompiled_shape_names_itself_and_the_limit() -> None:
    plan = BucketPlan.from_limits(**LIMITS)
    with pytest.raises(UncompiledShapeError, match=r"prefill of 1001 tokens.*1 to 1000 tokens"):
        plan.prefill(1001, 1)
    with pytest.raises(UncompiledShapeError, match=r"decode of 7 requests.*1 to 6 requests"):
        plan.decode(7)
    with pytest.raises(UncompiledShapeError, match=r"context of 1009 tokens.*1 to 1008 tokens"):
        plan.decode(6, 1009)
