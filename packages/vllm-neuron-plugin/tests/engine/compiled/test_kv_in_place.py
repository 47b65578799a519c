# SPDX-License-Identifier: Apache-2.0
"""A step writes its keys and values into the pool and allocates nothing of the pool's size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams

# 2 layers of 4 KiB for each block: 256 MiB of cache for steps that need a few hundred KiB.
NUM_BLOCKS = 32 * 1024


@pytest.fixture(scope="module")
def engine(engines: Any, tiny_llama: Path, tiny_settings: dict[str, Any]) -> Any:
    return engines(tiny_llama, **tiny_settings | {"num_gpu_blocks_override": NUM_BLOCKS})


class LargestResult(TorchDispatchMode):
    """Bytes of the largest tensor that any operator of this mode's life returned in memory of its own."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.largest = known, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def resident_bytes(name: str) -> int:
    """``VmRSS`` or its peak ``VmHWM`` of this process."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024


def forget_peak() -> None:
    """What earlier tests needed must not hide what a step needs; see proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


def test_steps_write_in_place_and_allocate_nothing_of_the_pools_size(engine, make_prompts):
    executor = engine.runner.executor
    pool = executor.kv_tensors
    pool_bytes = sum(tensor.untyped_storage().nbytes() for tensor in pool)
    assert pool_bytes == 2 * NUM_BLOCKS * 4096
    addresses = [tensor.data_ptr() for tensor in pool]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    sampled = SamplingParams(
        temperature=1.0, seed=1, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    prompts = make_prompts(8, 200, seed=1)
    # Pages of the pool that no request ever touched are not resident: touch all, so that the peak counts a copy.
    for tensor in pool:
        tensor.zero_()
    weights = {p.untyped_storage().data_ptr() for p in executor.model.parameters()}
    forget_peak()
    before = resident_bytes("VmRSS")
    with LargestResult({tensor.untyped_storage().data_ptr() for tensor in pool} | weights) as seen:
        engine.tokens(prompts, greedy)
        engine.tokens(prompts, sampled)
    assert [tensor.data_ptr() for tensor in executor.kv_tensors] == addresses
    assert seen.largest < pool_bytes // 100
    assert resident_bytes("VmHWM") - before < pool_bytes // 4  # compiled code allocates below the dispatcher
    written = [int((tensor.view(NUM_BLOCKS, -1) != 0).any(1).sum()) for tensor in pool]
    assert all(0 < count < 200 for count in written)


def test_only_the_slots_of_scheduled_tokens_change(engine):
    pool = engine.runner.executor.kv_tensors
    for tensor in pool:
        tensor.zero_()
    engine.tokens([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    for tensor in pool:  # 3 prompt tokens and the first 2 drawn; the last one drawn is never computed
        slots = tensor.transpose(1, 2).reshape(NUM_BLOCKS * 16, -1)
        touched = (slots != 0).any(1).nonzero()[:, 0].tolist()
        assert (
            touched == list(range(touched[0], touched[0] + 5)) and touched[0] % 16 == 0 and touched[0] >= 16
        )
