# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation of an engine's graphs: no weights, no device, no engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_core.devices.cpu import CpuDevice
from neuron_core.devices.host import ALLOWED_CPUS
from neuron_core.errors import ConfigError
from neuron_core.graphs.aot import AotResult, compile_ahead
from neuron_core.kv.slots import blocks_for
from neuron_models.aot import CPU_TARGET, ModelCompile
from neuron_parallel import ParallelPlan
from vllm_neuron.checks import kv_dtype
from vllm_neuron.config import bucket_plan, neuron_config
from vllm_neuron.engine_record import EngineRecord

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["AheadReport", "compile_engine", "model_compile"]


@dataclass(frozen=True)
class AheadReport:
    """What ``compile_engine`` did, bucket by bucket."""

    target: str
    cache_dir: Path
    tensor_parallel_size: int
    results: tuple[AotResult, ...]
    seconds: float

    @property
    def failed(self) -> tuple[AotResult, ...]:
        """Buckets that could not be compiled."""
        return tuple(result for result in self.results if result.error)

    @property
    def advice(self) -> str:
        """Why a step was left out for every bucket, such as a vendor compiler that is not installed."""
        found = (result.outcome.advice for result in self.results if result.outcome is not None)
        return next(filter(None, found), "")

    @property
    def is_complete(self) -> bool:
        """Whether a server can start from these artifacts without compiling."""
        return not self.failed and not self.advice


def model_compile(
    vllm_config: VllmConfig,
    target: str,
    cache_dir: Path,
    *,
    cpu_threads: int | None = None,
    lnc: int | None = None,
    jobs: int = 1,
    retry_failed: bool = False,
) -> ModelCompile:
    """What an engine of this configuration needs compiled."""
    plan = bucket_plan(vllm_config)
    cache, model, parallel = vllm_config.cache_config, vllm_config.model_config, vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    # One maximum-length request per row, and the null block.
    blocks = plan.max_num_seqs * blocks_for(plan.max_model_len, plan.block_size) + 1
    return ModelCompile(
        config=model.hf_text_config,
        dtype=model.dtype,
        plan=plan,
        parallel=ParallelPlan(ranks),
        target=target,
        cache_dir=cache_dir,
        num_blocks=cache.num_gpu_blocks_override or blocks,
        cpu_threads=cpu_threads or len(CpuDevice().threads(0, ranks)),
        compiler=neuron_config(vllm_config).compiler,
        lnc=lnc,
        jobs=max(1, len(ALLOWED_CPUS) // jobs),
        retry_failed=retry_failed,
        kv_dtype=kv_dtype(vllm_config),
        prompt_embeds=model.enable_prompt_embeds,
    )


def compile_engine(
    vllm_config: VllmConfig,
    job: ModelCompile,
    *,
    jobs: int,
    on_result: Callable[[AotResult], None] = lambda result: None,
) -> AheadReport:
    """Compile every bucket in ``jobs`` processes; a failing one is reported and the others continue.

    A complete compile leaves a record of the engine's shapes, which ``VLLM_NEURON_REQUIRE_COMPILED`` compares with.
    """
    if jobs < 1:
        raise ConfigError("jobs", jobs, "must be at least 1; 1 works")
    begun = time.perf_counter()
    results = compile_ahead(
        job.worker(), job.tasks(), jobs=jobs, logs=job.cache_dir / "logs", on_result=on_result
    )
    seconds = time.perf_counter() - begun
    report = AheadReport(job.target, job.cache_dir, job.parallel.world_size, tuple(results), seconds)
    if report.is_complete and job.target == CPU_TARGET:
        EngineRecord.of(vllm_config).write(job.cache_dir)
    return report
