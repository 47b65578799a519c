# SPDX-License-Identifier: Apache-2.0
"""Padding writes nothing, reads nothing and changes nothing: a step gives the same bits in every bucket it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from neuron_core.devices.cpu import CpuDevice
from neuron_core.graphs.buckets import Bucket, BucketPlan, Phase
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers import FxCompiler
from neuron_core.graphs.model_programs import ModelPrograms
from neuron_core.sampling_state import SamplingState
from neuron_core.step import StepInput
from neuron_models import build_model
from neuron_parallel import ParallelGroups
from vllm_neuron.runner.inputs import Batch, build, make_batch
from vllm_neuron.runner.requests import RequestTable

BLOCK, LENGTH, SEQS = 16, 320, 5
MAX_BLOCKS = LENGTH // BLOCK
NUM_BLOCKS = 1 + SEQS * MAX_BLOCKS
PLAN = BucketPlan.from_limits(
    max_model_len=LENGTH,
    max_num_seqs=SEQS,
    max_num_batched_tokens=LENGTH,
    block_size=BLOCK,
    prefill_buckets=[24, 80, LENGTH],
    decode_buckets=[2, 3, SEQS],
    decode_context_length_buckets=[128, 256],
    max_prefill_seqs=SEQS,
)
STEPS = [bucket for bucket in PLAN.all() if bucket.phase is not Phase.LOGITS]
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "architectures": ["LlamaForCausalLM"],
}

Run = Callable[[Bucket, str, StepInput, list[Tensor]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def run(graph_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(bucket, variant, step, kv)``: a tiny bfloat16 Llama on the CPU device's kernels, interpreted."""
    device = CpuDevice(cache_dir=graph_cache)
    device.start(0, 1)
    model = build_model(
        LlamaConfig(**SIZES), dtype=torch.bfloat16, groups=ParallelGroups.single(), block_size=BLOCK
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    device.prepare(model)
    programs = ModelPrograms(model, PLAN, NUM_BLOCKS)
    cache = CompileCache(tmp_path_factory.mktemp("graphs"))
    builder = GraphBuilder(device, FxCompiler(), cache)
    compiled = {
        (bucket, variant): builder.build(programs.program(bucket, variant), programs.specs(bucket))
        for bucket, variant in programs.wanted()
    }
    builder.close()
    state = SamplingState(PLAN.max_num_seqs, SIZES["vocab_size"])

    @torch.no_grad()
    def run_step(bucket: Bucket, variant: str, step: StepInput, kv: list[Tensor]) -> dict[str, Tensor]:
        kept = {f"kv.{index}": tensor for index, tensor in enumerate(kv)} | state.tensors
        return compiled[bucket, variant]({**programs.padding(bucket), **step.as_values(), **kept})

    return run_step


@st.composite
def steps(draw: st.DrawFn) -> tuple[RequestTable, list[int]]:
    """Requests of scattered blocks somewhere in their prompts or their answers, and the tokens each computes."""
    is_decode = draw(st.booleans())
    order = draw(st.permutations(range(1, NUM_BLOCKS)))
    schedule, counts, left = SchedulerOutput.make_empty(), [], LENGTH
    for index in range(draw(st.integers(1, SEQS))):
        near = draw(st.sampled_from([1, BLOCK, 128, 256, LENGTH]))  # borders of blocks and of contexts
        reach = min(max(near + draw(st.integers(-2, 2)), 1), LENGTH)
        count = 1 if is_decode else draw(st.integers(1, max(1, min(reach, left - SEQS))))
        left -= count
        blocks = list(order[index * MAX_BLOCKS : index * MAX_BLOCKS + -(-reach // BLOCK)])
        ids = [(index + 7 * place + reach) % SIZES["vocab_size"] for place in range(reach)]
        params = SamplingParams(temperature=draw(st.sampled_from([0.0, 1.0])), top_k=5, seed=index)
        request = NewRequestData(f"r{index}", ids, [], params, None, (blocks,), reach - count, None)
        schedule.scheduled_new_reqs.append(request)
        counts.append(count)
    table = RequestTable(PLAN.context_len, BLOCK, MAX_BLOCKS, engine_seed=0)
    table.update(schedule)
    return table, counts


def slots_of(table: RequestTable, begin: list[int], end: list[int]) -> list[int]:
    """Slots of each request's tokens from ``begin`` to ``end``, from the definition of a slot."""
    return [
        int(table.block_tables[request.row][place // BLOCK]) * BLOCK + place % BLOCK
        for request, first, last in zip(table.requests.values(), begin, end, strict=True)
        for place in range(first, last)
    ]


def by_slot(kv: Tensor) -> Tensor:
    """``[slots, bytes]`` of a cache ``[blocks, heads, block, 2 * head_dim]``, to compare bits."""
    return kv.permute(0, 2, 1, 3).reshape(NUM_BLOCKS * BLOCK, -1).contiguous().view(torch.int16)


def cache_with(known: list[int]) -> list[Tensor]:
    """Random keys and values in the slots ``known``; everywhere else NaN, which spreads if it is read."""
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_BLOCKS, BLOCK, 2, 2 * 16)
    layers = []
    for _ in range(2):
        kv = torch.full(shape, float("nan"))
        kv.view(NUM_BLOCKS * BLOCK, -1)[known] = torch.randn(len(known), 2 * 32, generator=generator)
        layers.append(kv.permute(0, 2, 1, 3).contiguous().bfloat16())
    return layers


def check_padding(step: StepInput, bucket: Bucket, num_tokens: int, blocks: list[list[int]]) -> None:
    """Every place of a step that no scheduled token and no request fills says so."""
    assert step.slots[num_tokens:].eq(-1).all() and step.request_rows[num_tokens:].eq(-1).all()
    assert not step.token_ids[num_tokens:].any() and not step.positions[num_tokens:].any()
    width = bucket.context_len // BLOCK
    blocks = [ids[:width] for ids in blocks] + [[]] * (bucket.num_seqs - len(blocks))
    assert step.block_tables.tolist() == [ids + [-1] * (width - len(ids)) for ids in blocks]


def larger(batch: Batch, reach: int) -> list[Bucket]:
    """Every other bucket the step fits, of both phases: a decode step is also a prefill of one token each."""
    tokens, seqs = int(batch.starts[-1]), len(batch.requests)
    fitting = [
        bucket
        for bucket in STEPS
        if (bucket.num_tokens >= tokens and bucket.num_seqs >= seqs and bucket.context_len >= reach)
        and (bucket.phase is Phase.PREFILL or tokens == seqs)
    ]
    assert batch.bucket in fitting
    return [bucket for bucket in fitting if bucket != batch.bucket]


@given(drawn=steps(), variant=st.sampled_from(["greedy", "sample"]))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_step_gives_the_same_bits_in_every_bucket_and_writes_its_slots_alone(
    run: Run, drawn: tuple[RequestTable, list[int]], variant: str
) -> None:
    table, counts = drawn
    requests = list(table.requests.values())
    ends = [int(table.num_computed[r.row]) + count for r, count in zip(requests, counts, strict=True)]
    begins = [end - count for end, count in zip(ends, counts, strict=True)]
    blocks = [table.block_tables[r.row][: r.num_blocks].tolist() for r in requests]
    before = cache_with(slots_of(table, [0] * len(begins), begins))
    written = slots_of(table, begins, ends)
    batch = make_batch(table, PLAN, requests, counts)
    results = []
    for bucket in [batch.bucket, *larger(batch, max(ends))]:
        step = build(table, replace(batch, bucket=bucket), rank=0)
        step.check(bucket, BLOCK)
        check_padding(step, bucket, sum(counts), blocks)
        kv = [tensor.clone() for tensor in before]
        outputs = run(bucket, variant, step, kv)
        results.append((outputs, kv))
        for layer, old in zip(kv, before, strict=True):
            kept = torch.ones(NUM_BLOCKS * BLOCK, dtype=torch.bool)
            kept[written] = False
            assert torch.equal(by_slot(layer)[kept], by_slot(old)[kept]), bucket.name
            assert not layer.permute(0, 2, 1, 3).reshape(NUM_BLOCKS * BLOCK, -1)[written].isnan().any()
    real = {"tokens": len(counts), "logits": len(counts), "hidden_states": sum(counts)}
    first, first_kv = results[0]
    assert all(not value[: real[name]].isnan().any() for name, value in first.items())
    for outputs, kv in results[1:]:
        for name, value in outputs.items():
            assert torch.equal(value[: real[name]], first[name][: real[name]]), name
        assert all(torch.equal(by_slot(a), by_slot(b)) for a, b in zip(kv, first_kv, strict=True))


@pytest.mark.parametrize("bucket", STEPS, ids=lambda bucket: bucket.name)
def test_a_step_of_padding_alone_leaves_every_bit_of_the_cache(run: Run, bucket: Bucket) -> None:
    before = cache_with(list(range(0, NUM_BLOCKS * BLOCK, 3)))
    kv = [tensor.clone() for tensor in before]
    outputs = run(bucket, "sample", StepInput.padding(bucket, BLOCK), kv)
    assert all(torch.equal(by_slot(a), by_slot(b)) for a, b in zip(kv, before, strict=True))
    assert not outputs["logits"].isnan().any()
