# SPDX-License-Identifier: Apache-2.0
"""Faults of the kinds that engines have had, planted in every process of an engine by ``PLANTED_FAULT``.

With this folder on ``PYTHONPATH`` vLLM loads it as a general plugin. Graphs are made from what is patched here and the
compile cache knows sources, not patches: give each fault a cache of its own.
"""

from __future__ import annotations

import os
from typing import Any

import torch

FAULTY_LAYER = 1
FAULTY_ROW = 5


def plant() -> None:
    name = os.environ.get("PLANTED_FAULT")
    if name:
        FAULTS[name]()


def after_loading(change: Any) -> None:
    from vllm_neuron import worker

    fill = worker.fill_weights

    @torch.no_grad()
    def filled(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = fill(model, *args, **kwargs)
        change(model)
        return result

    worker.fill_weights = filled


def weight_row() -> None:
    """One row of one layer's down projection is 2 % too large."""

    def change(model: Any) -> None:
        model.model.layers[FAULTY_LAYER].mlp.down_proj.weight[FAULTY_ROW] *= 1.02

    after_loading(change)


def rope_base() -> None:
    """The base of the rotary embedding is twice what the config says."""

    def change(model: Any) -> None:
        table = model.rotary
        exponents = torch.arange(len(table.inv_freq)) / len(table.inv_freq)
        table.inv_freq.mul_(2.0**-exponents)

    after_loading(change)


def swapped_kv_heads() -> None:
    """With two ranks, each loads the KV heads of the other."""
    from neuron_parallel import ShardBlock

    span = ShardBlock.span

    def swapped(block: Any, rank: int, world: int) -> tuple[int, int]:
        return span(block, world - 1 - rank if block.name in ("k_proj", "v_proj") else rank, world)

    ShardBlock.span = swapped


def overwritten_block() -> None:
    """The second block of a request is written to after it was given back, while the prefix cache still offers it."""
    from vllm_neuron.runner.model_runner import NeuronModelRunner
    from vllm_neuron.runner.requests import RequestTable

    make, update = NeuronModelRunner.__init__, RequestTable.update

    def made(runner: Any, *args: Any, **kwargs: Any) -> None:
        make(runner, *args, **kwargs)
        runner.table.executor = runner.executor

    def updated(table: Any, step: Any) -> None:
        for name in step.finished_req_ids:
            request = table.requests.get(name)
            if request is not None and request.num_blocks > 1:
                block = int(table.block_tables[request.row, 1])
                for cache in table.executor.kv_tensors:
                    cache[block] = torch.randn(cache[block].shape, generator=torch.Generator().manual_seed(1))
        update(table, step)

    NeuronModelRunner.__init__, RequestTable.update = made, updated


def padded_slot() -> None:
    """Attention reads one slot beyond the token's own, where its block has one."""
    from neuron_core import ops

    attend = ops.paged_attention

    def further(query: Any, kv: Any, tables: Any, rows: Any, positions: Any, **kwargs: Any) -> Any:
        return attend(query, kv, tables, rows, positions + (positions % 16 != 15).int(), **kwargs)

    ops.paged_attention = further


def fp8_scale() -> None:
    """Keys are divided by twice the scale that they are multiplied by when they are read."""
    from neuron_core import ops

    write = ops.kv_write_

    def scaled(*args: Any, k_scale: Any = None, **kwargs: Any) -> Any:
        return write(*args, k_scale=None if k_scale is None else k_scale * 2, **kwargs)

    ops.kv_write_ = scaled


def ignored_top_p() -> None:
    """The sampler keeps every token, whatever top-p says."""
    from vllm_neuron.runner.requests import RequestTable

    add = RequestTable._add

    def added(table: Any, new: Any) -> None:
        add(table, new)
        table.top_p[table.requests[new.req_id].row] = 1.0

    RequestTable._add = added


def narrow_sum() -> None:
    """One layer's output projection adds up in bfloat16."""
    from neuron_parallel import RowParallelLinear

    forward = RowParallelLinear.forward

    def change(model: Any) -> None:
        layer = model.model.layers[FAULTY_LAYER].self_attn.o_proj
        layer.sums_narrowly, layer.packable = True, False

    def summed(layer: Any, x: Any, sequence_parallel: bool = False) -> Any:
        if not getattr(layer, "sums_narrowly", False):
            return forward(layer, x, sequence_parallel)
        total = torch.zeros(x.shape[0], layer.out_features, dtype=torch.bfloat16)
        for column in range(x.shape[1]):
            total = total + x[:, column : column + 1] * layer.weight[:, column]
        return total

    after_loading(change)
    RowParallelLinear.forward = summed


FAULTS = {
    function.__name__: function
    for function in (
        weight_row,
        rope_base,
        swapped_kv_heads,
        overwritten_block,
        padded_slot,
        fp8_scale,
        ignored_top_p,
        narrow_sum,
    )
}
