# SPDX-License-Identifier: Apache-2.0
"""One small engine in this process for many tests, its oracle, and a check that each test leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# The engine core in this process: tests look at its scheduler and count its steps.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

SMALL_ENGINE: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 33,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 41,
    "dtype": "float32",
    "additional_config": {"neuron_config": {"compiler": "fx", "decode_buckets": [1, 4, 33]}},
}
"""33 rows, 40 usable blocks of 16 tokens, prompts above 64 tokens in chunks; graphs are interpreted."""


@dataclass
class Engine:
    """A vLLM engine and its scheduler."""

    llm: Any

    @property
    def core(self) -> Any:
        """The engine core, which runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """The ``NeuronScheduler`` of this engine."""
        return self.core.scheduler

    def greedy(self, prompts: list[list[int]], max_tokens: int, **params: Any) -> list[list[int]]:
        """Greedy continuations of exactly ``max_tokens`` tokens."""
        from vllm import SamplingParams

        settings = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def check_idle(self) -> None:
        """No request is left and every block but the null block is free."""
        assert self.scheduler.get_request_counts() == (0, 0)
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.fixture(scope="session")
def shared_engine(tiny_llama: Path) -> Engine:
    """The small engine, started once."""
    from vllm import LLM

    return Engine(LLM(str(tiny_llama), **SMALL_ENGINE))


@pytest.fixture
def engine(shared_engine: Engine, reference: Callable[..., list[int]]) -> Iterator[Engine]:
    """The small engine with an empty prefix cache; afterwards it still answers right and holds nothing."""
    shared_engine.scheduler.reset_prefix_cache()
    yield shared_engine
    shared_engine.check_idle()
    assert shared_engine.greedy([[9, 8, 7]], 4) == [reference([9, 8, 7], 4)]
    shared_engine.check_idle()


@pytest.fixture(scope="session")
def reference(tiny_llama: Path) -> Callable[..., list[int]]:
    """Greedy continuation of one prompt by transformers, in fp32."""
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()

    def continuation(prompt: list[int], max_tokens: int) -> list[int]:
        # No end-of-sequence token: the engine is asked to ignore it, which is not the same as banning it.
        settings = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=2)
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), generation_config=settings)
        return ids[0, len(prompt) :].tolist()

    return continuation
