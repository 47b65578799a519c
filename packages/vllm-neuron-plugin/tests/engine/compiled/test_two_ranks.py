# SPDX-License-Identifier: Apache-2.0
"""Two ranks over gloo give the tokens of one, compile at warm-up only, and refuse heads they cannot share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

# Case N2 of the public reports: a small length, few requests, large blocks, two ranks, prefix caching.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": 64,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 40,
    "tensor_parallel_size": 2,
    "additional_config": {"neuron_config": {"prefill_buckets": [128], "decode_buckets": [4]}},
}
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(
    engines: Any,
    tiny_llama: Path,
    engine_environment: pytest.MonkeyPatch,
    graph_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """Started on a compile cache without a graph."""
    cold = tmp_path_factory.mktemp("cold")
    for name in ("kernels", "toolchain"):
        if (graph_cache / name).is_dir():
            shutil.copytree(graph_cache / name, cold / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NEURON_CACHE_DIR", str(cold))
        return engines(tiny_llama, **SETTINGS)


def test_n2_warm_up_compiles_and_the_first_requests_do_not(engine, tiny_llama, make_prompts):
    before = engine.graph_counts()
    assert len(before) == 2
    # Both ranks run the same graphs: each is compiled by one of them and loaded by the other.
    assert sum(rank["compiled"] for rank in before) > 0
    assert {rank["compiled"] + rank["loaded"] for rank in before} == {
        before[0]["compiled"] + before[0]["loaded"]
    }
    (prompt,) = make_prompts(1, 1, seed=1)
    prompt = prompt * 100
    first, second = (engine.run([prompt], PARAMS)[0] for _ in range(2))
    assert [first.num_cached_tokens, second.num_cached_tokens] == [0, 64]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert engine.graph_counts() == before


def held_by_torch(worker: Any) -> dict[str, int]:
    """What torch's storages of one rank's weights and cache take; tied and packed ones count once."""
    model = worker.get_model()
    storages = {
        kind: {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        for kind, tensors in (
            ("weights", [*model.parameters(), *model.buffers()]),
            ("kv_cache", worker.runner.executor.kv_tensors),
        )
    }
    return {kind: sum(found.values()) for kind, found in storages.items()}


def exported_by_rank(worker: Any) -> dict[str, float | None]:
    """The same as the rank's own process exports it."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    labels = {"model_name": worker.model_config.served_model_name, "rank_id": str(worker.rank)}
    registry = get_prometheus_registry()
    return {
        kind: registry.get_sample_value("vllm_neuron:device_memory_bytes", labels | {"kind": kind})
        for kind in ("weights", "kv_cache")
    }


def test_each_rank_exports_the_bytes_that_torch_holds(engine):
    held = engine.core.model_executor.collective_rpc(held_by_torch)
    assert len(held) == 2 and all(size > 0 for rank in held for size in rank.values())
    assert engine.core.model_executor.collective_rpc(exported_by_rank) == held


@pytest.mark.supports("tensor parallelism", model="llama")
def test_tokens_of_two_ranks_are_those_of_one(engine, tiny_llama, make_prompts, continuations):
    prompts = make_prompts(16, 100, seed=2)
    assert engine.tokens(prompts, PARAMS, arrive=2) == continuations(tiny_llama, prompts, 24)


def test_sampled_tokens_of_two_ranks_are_those_of_one(engine, tiny, make_prompts):
    prompts = make_prompts(6, 60, seed=3)
    each = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 16, "ignore_eos": True, "logprobs": 1}
    params = [
        SamplingParams(**each, seed=index, frequency_penalty=index % 3, logit_bias={40 + index: 2.0})
        for index in range(len(prompts))
    ]
    assert engine.tokens(prompts, params) == tiny.tokens(prompts, params)


def test_heads_that_two_ranks_cannot_share_are_named(smollm2, engine_environment):
    from vllm import LLM

    # SmolLM2 has 9 query and 3 key-value heads.
    with pytest.raises(Exception, match=r"(?s)\b9\b.*tensor.parallel"):
        LLM(str(smollm2), max_model_len=128, tensor_parallel_size=2)
