# SPDX-License-Identifier: Apache-2.0
"""A scheduler without an engine: vLLM's own configuration, blocks and requests, and a model of one token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import EngineArgs, SamplingParams, envs
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16


@pytest.fixture(autouse=True)
def as_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What engines of the same test run left behind: vLLM's cache of its variables, and one it sets for workers."""
    envs.disable_envs_cache()
    monkeypatch.delenv("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", raising=False)


def kv_cache_config(num_blocks: int) -> KVCacheConfig:
    """One layer, one group; block 0 is the null block, so ``num_blocks - 1`` can be used."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=page * num_blocks, layers=["l"], layer_stride=page * num_blocks, block_stride=page
    )
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
    )


class Harness:
    """Drives a scheduler the way an engine does, ``depth`` steps ahead of their results.

    Every sampled token is 7. ``events`` has one entry per step: phase, tokens by request, and what finished.
    """

    def __init__(self, config: VllmConfig, num_blocks: int, depth: int) -> None:
        from vllm_neuron.scheduler import NeuronScheduler

        config.cache_config.num_gpu_blocks = num_blocks
        self.num_blocks = num_blocks
        self.scheduler = NeuronScheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config(num_blocks),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.depth = depth
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.requests: dict[str, Request] = {}
        self._hasher = None
        if config.cache_config.enable_prefix_caching:
            init_none_hash(hash)
            self._hasher = get_request_block_hasher(BLOCK, lambda value: str(hash(str(value))).encode())

    def add(
        self, name: str, prompt: int | list[int], max_tokens: int = 4, priority: int = 0, **params: Any
    ) -> Request:
        """Queue a request; an integer prompt becomes that many tokens found in no other request's prompt."""
        tokens = prompt if isinstance(prompt, list) else [3 + len(self.requests), *[9] * (prompt - 1)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        request = Request(name, tokens, params, None, priority=priority, block_hasher=self._hasher)
        request.arrival_time = float(len(self.requests))
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """End a request the way a client's disconnect does."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Schedule one step; results of a step are delivered ``depth - 1`` steps later."""
        output = self.scheduler.schedule(False)
        self.in_flight.append((output, self._compute(output)))
        while len(self.in_flight) >= self.depth:
            self.scheduler.update_from_output(*self.in_flight.popleft())
        return output

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        sampled = [[] if self.requests[name].is_prefill_chunk else [7] for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def row(self) -> tuple[str, dict[str, int]]:
        """One step as a table row: phase (``-`` for none) and scheduled tokens by request."""
        output = self.step()
        counts = dict(output.num_scheduled_tokens)
        if not counts:
            return "-", counts
        cached = output.scheduled_cached_reqs
        starts = bool(output.scheduled_new_reqs or cached.resumed_req_ids)
        # A request inside its prompt has sampled nothing, not even a token in flight.
        in_prompt = any(num_output == 0 for num_output in cached.num_output_tokens)
        prefill = starts or in_prompt or any(count > 1 for count in counts.values())
        return "prefill" if prefill else "decode", counts

    def finish(self, limit: int = 2000) -> int:
        """Step until nothing is left; returns the number of steps, fails beyond ``limit``."""
        for count in range(limit):
            if not self.scheduler.has_requests() and not self.in_flight:
                return count
            self.step()
            if not self.scheduler.has_requests():
                while self.in_flight:
                    self.scheduler.update_from_output(*self.in_flight.popleft())
        raise AssertionError(f"still unfinished after {limit} steps: {self.scheduler.get_request_counts()}")

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def check_idle(self) -> None:
        """Nothing is left: no request in any queue, every block but the null block free."""
        assert self.scheduler.get_request_counts() == (0, 0)
        assert not self.scheduler.requests
        assert self.free_blocks == self.num_blocks - 1


@pytest.fixture(scope="session")
def make_config(tiny_llama: Path) -> Callable[..., VllmConfig]:
    """Build a real engine configuration of the tiny model; keyword arguments are ``EngineArgs``'."""

    def build(**overrides: Any) -> VllmConfig:
        settings = {
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "dtype": "float32",
        }
        return EngineArgs(model=str(tiny_llama), **(settings | overrides)).create_engine_config()

    return build


@pytest.fixture
def make_scheduler(make_config: Callable[..., VllmConfig]) -> Iterator[Callable[..., Harness]]:
    """Build a ``Harness``; ``neuron_config`` keys go to the plugin, other arguments to ``EngineArgs``."""

    def build(
        *, num_blocks: int = 64, depth: int = 1, neuron: dict[str, object] | None = None, **args: Any
    ) -> Harness:
        args.setdefault("enable_prefix_caching", False)
        config = make_config(
            additional_config={"neuron_config": neuron or {}}, async_scheduling=depth > 1, **args
        )
        return Harness(config, num_blocks, depth)

    yield build
