# SPDX-License-Identifier: Apache-2.0
"""At start every graph runs once, however many layers and buckets share it, and the cache stays as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig

from neuron_core.devices.cpu import CpuDevice
from neuron_core.graphs.buckets import Bucket, BucketPlan
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers import FxCompiler
from neuron_core.protocols import GraphCall
from neuron_models import build_model
from neuron_parallel import ParallelGroups
from vllm_neuron.runner.executor import GraphExecutor
from vllm_neuron.startup_times import StartupTimes

PLAN = BucketPlan.from_limits(
    max_model_len=256,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    block_size=16,
    prefill_buckets=[64],
    decode_context_length_buckets=[128],
)
LAYERS = 3


class CountingCompiler(FxCompiler):
    """Interprets graphs, and counts the calls of each artifact."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Path] = Counter()

    def load(self, entry: Path, groups: Sequence[str] = ()) -> GraphCall:
        call = super().load(entry, groups)
        self.calls[entry] = 0

        def counted(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            self.calls[entry] += 1
            return call(inputs)

        return counted


@torch.no_grad()
def test_each_distinct_graph_runs_once_and_no_block_is_written(tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    model = build_model(config, dtype=torch.float32, groups=ParallelGroups.single(), block_size=16)
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    compiler = CountingCompiler()
    executor = GraphExecutor(model, PLAN, GraphBuilder(CpuDevice(), compiler, CompileCache(tmp_path)), rank=0)
    executor.allocate(model.kv_layouts, 20, torch.device("cpu"))
    for kv in executor.kv_tensors:
        kv.fill_(7.0)
    ready: list[tuple[Bucket, str]] = []
    executor.compile(lambda done, total, bucket, variant: ready.append((bucket, variant)), StartupTimes())

    steps = [bucket for bucket in PLAN.all() if bucket.phase != "logits"]
    assert len(steps) == 1 + 2 * 2
    assert len(ready) == 2 * len(steps) + 1
    # By size an embedding and two heads; a layer for each bucket; and the head of the log-probabilities.
    sizes = {bucket.num_tokens for bucket in steps}
    assert len(compiler.calls) == 3 * len(sizes) + len(steps) + 1
    assert set(compiler.calls.values()) == {1}
    assert all((kv == 7.0).all() for kv in executor.kv_tensors)
