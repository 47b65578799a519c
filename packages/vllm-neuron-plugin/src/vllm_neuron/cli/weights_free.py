# SPDX-License-Identifier: Apache-2.0
"""What is known of a server before its weights are read: the memory it will need, and graphs it need not compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_core import ops
from neuron_core.devices.discovery import open_device
from neuron_core.environ import Environment
from neuron_core.errors import CompileError
from neuron_core.graphs.buckets import Bucket
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers import compiler_named
from neuron_core.graphs.model_programs import ModelPrograms, variants
from neuron_core.protocols import StaticModel
from neuron_models.aot import CPU_TARGET, ModelWorker
from neuron_parallel import ParallelGroups
from vllm_neuron.ahead import model_compile
from vllm_neuron.platform import discovered
from vllm_neuron.start_estimate import StartEstimates
from vllm_neuron.unfilled import unfilled_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["ready_buckets", "start_estimates"]


def start_estimates(vllm_config: VllmConfig) -> StartEstimates:
    """The estimates a worker makes before it reads weights, for this host's memory as it is now."""
    environment = Environment.read()
    device = open_device(discovered().device.name, environment)
    if device.chip is None:
        ops.load_kernels(environment.cache_dir)  # whether a weight is packed is a question to them

    def make(groups: ParallelGroups) -> StaticModel:
        return unfilled_model(vllm_config, device.chip, groups)

    return StartEstimates(vllm_config, device, make)


def ready_buckets(vllm_config: VllmConfig) -> dict[str, bool] | None:
    """Of each bucket by name, whether the local compile cache has all its graphs; None where that is not known.

    Nothing is compiled or fetched. Only the CPU device has a compiler that can be asked.
    """
    environment = Environment.read()
    if discovered().device.chip is not None:
        return None
    job = model_compile(vllm_config, CPU_TARGET, environment.cache_dir)
    if not (environment.cache_dir / "graphs").is_dir():
        return {bucket.name: False for bucket in job.plan.all()}
    programs = ModelWorker(job).programs
    cache = CompileCache(environment.cache_dir)
    builder = GraphBuilder(
        open_device(CPU_TARGET, environment),
        compiler_named(job.compiler, cache.toolchain_dir, job.cpu_threads),
        cache,
        require_compiled=True,
        load=False,
    )
    try:
        return {bucket.name: _is_ready(builder, programs, bucket) for bucket in job.plan.all()}
    finally:
        builder.close()


def _is_ready(builder: GraphBuilder, programs: ModelPrograms, bucket: Bucket) -> bool:
    try:
        for variant in variants(bucket):
            builder.build(programs.program(bucket, variant), programs.specs(bucket), bucket=bucket.name)
    except CompileError:  # it is missing, or compiling it failed before
        return False
    return True
