# SPDX-License-Identifier: Apache-2.0
"""``vllm-neuron config`` says what a real engine of the same flags is configured as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MADE_BY_RUNNING = {
    "cache_config.effective_attention_block_size",
    "cache_config.kv_cache_layout",
    "cache_config.kv_cache_max_concurrency",
    "cache_config.kv_cache_size_tokens",
    "cache_config.num_gpu_blocks",
    "compilation_config.compilation_time",
    "instance_id",
}
"""What an engine fills in once it has weights and memory, and a random name."""


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings that the shared engine was started with."""
    llm = request.getfixturevalue("shared_engine").llm
    config = llm.llm_engine.vllm_config
    return {
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "num_gpu_blocks_override": config.cache_config.num_gpu_blocks_override,
        "dtype": "float32",
        "additional_config": config.additional_config,
    }


def test_every_setting_is_the_engines_own(shared_engine, settings, tiny_llama: Path):
    from vllm_neuron.cli.arguments import ServeArguments, flag_name
    from vllm_neuron.cli.resolve import resolve, settings_of

    words = [
        word
        for name, value in settings.items()
        for word in (flag_name(name), value if isinstance(value, str) else json.dumps(value))
    ]
    resolved = resolve(ServeArguments.parse(str(tiny_llama), words))
    ours, theirs = resolved.settings(), settings_of(shared_engine.llm.llm_engine.vllm_config)
    assert ours.keys() == theirs.keys() and len(ours) > 200
    assert {name for name in ours if ours[name] != theirs[name]} <= MADE_BY_RUNNING
    assert not any(flag.changed for flag in resolved.flags)


def test_the_buckets_are_those_the_worker_has_compiled(shared_engine, settings, tiny_llama: Path):
    from vllm_neuron.cli.arguments import engine_config
    from vllm_neuron.config import bucket_plan

    words = [f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items()]
    words = [word.replace('"float32"', "float32") for word in words]
    runner = shared_engine.core.model_executor.driver_worker.worker.runner
    assert bucket_plan(engine_config(str(tiny_llama), words)).all() == runner.plan.all()


def test_the_weights_in_the_estimate_are_those_the_worker_holds(shared_engine):
    from neuron_core.memory import module_bytes
    from vllm_neuron.cli.weights_free import start_estimates

    worker = shared_engine.core.model_executor.driver_worker.worker
    estimate = start_estimates(shared_engine.llm.llm_engine.vllm_config).own()
    assert estimate.footprint.weights_bytes == module_bytes([worker.get_model()])
    assert estimate.footprint.layouts == tuple(worker.model.kv_layouts)
