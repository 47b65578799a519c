# SPDX-License-Identifier: Apache-2.0
"""Every input of a step takes its shape from the bucket."""

import dataclasses

import pytest
import torch

from neuron_core.graphs.buckets import Bucket, Phase
from neuron_core.step import StepInput

BUCKETS = [
    Bucket(Phase.PREFILL, 128, 4, 512),
    Bucket(Phase.DECODE, 3, 3, 512),
]


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda b: b.name)
def test_padding_has_the_bucket_s_shapes_and_touches_nothing(bucket: Bucket) -> None:
    step = StepInput.padding(bucket, block_size=16, rank=3)
    values = step.as_values()
    t, r, w = bucket.num_tokens, bucket.num_seqs, 32
    assert {name: tuple(value.shape) for name, value in values.items()} == {
        "token_ids": (t,),
        "positions": (t,),
        "slots": (t,),
        "request_rows": (t,),
        "block_tables": (r, w),
        "sample_rows": (r,),
        "temperature": (r,),
        "top_k": (r,),
        "top_p": (r,),
        "min_p": (r,),
        "uniform": (r,),
        "rank": (1,),
    }
    floats = {name for name, value in values.items() if value.dtype == torch.float32}
    assert floats == {"temperature", "top_p", "min_p", "uniform"}
    assert all(value.dtype == torch.int32 for name, value in values.items() if name not in floats)
    for name in ("slots", "request_rows", "block_tables"):
        assert (values[name] == -1).all()
    assert (step.top_p == 1).all() and not step.temperature.any() and step.rank.tolist() == [3]


def test_names_follow_the_specs_and_values_are_not_copied() -> None:
    step = StepInput.padding(BUCKETS[0], 16)
    assert StepInput.names() == tuple(StepInput.specs(BUCKETS[0], 16)) == tuple(step.as_values())
    assert step.as_values()["slots"].data_ptr() == step.slots.data_ptr()


def test_check_accepts_its_bucket_and_names_what_differs() -> None:
    step = StepInput.padding(BUCKETS[0], 16)
    step.check(BUCKETS[0], 16)
    wrong_dtype = dataclasses.replace(step, positions=step.positions.long())
    with pytest.raises(ValueError, match=r"positions is torch.int64 \[128\]; prefill_s128 takes torch.int32"):
        wrong_dtype.check(BUCKETS[0], 16)
    with pytest.raises(ValueError, match=r"token_ids is torch.int32 \[128\]; decode_b3"):
        step.check(BUCKETS[1], 16)
    with pytest.raises(ValueError, match="block_tables"):
        step.check(BUCKETS[0], 32)


def test_blocks_must_divide_the_context() -> None:
    with pytest.raises(ValueError, match="not whole blocks of 24"):
        StepInput.specs(BUCKETS[0], 24)
