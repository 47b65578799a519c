# SPDX-License-Identifier: Apache-2.0
"""Compiling a model's graphs without its weights: what one worker of ahead-of-time compilation does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.backend_registration import rename_privateuse1_backend
from transformers import PretrainedConfig

from neuron_core import ops
from neuron_core.devices.chips import chip_for_target
from neuron_core.devices.cpu import CpuDevice
from neuron_core.environ import Environment
from neuron_core.graphs.aot import AotTask, AotWorker, Outcome
from neuron_core.graphs.buckets import Bucket, BucketPlan
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.compilers import compiler_named
from neuron_core.graphs.configured import configured_cache
from neuron_core.graphs.model_programs import ModelPrograms, variants
from neuron_core.graphs.passes import default_passes
from neuron_core.protocols import Compiler
from neuron_models.attention import fit_to_chip
from neuron_models.pooling import build_model_for
from neuron_parallel import ParallelGroups, ParallelPlan

__all__ = ["CPU_TARGET", "ModelCompile", "ModelWorker", "neuron_torch_device"]

CPU_TARGET = "cpu"


@dataclass(frozen=True)
class ModelCompile:
    """What to compile: picklable, and all that a worker needs to know.

    ``num_blocks`` is the size of the KV cache, which is part of an artifact for a Neuron chip and of none for the
    CPU. ``cpu_threads`` is the number of threads a rank has where the artifacts will run; ``jobs`` how many
    compiles one worker runs at once. Artifacts go to the compile cache at ``cache_dir``.
    """

    config: PretrainedConfig
    dtype: torch.dtype
    plan: BucketPlan
    parallel: ParallelPlan
    target: str
    cache_dir: Path
    num_blocks: int
    cpu_threads: int
    compiler: str = "inductor"
    lnc: int | None = None
    jobs: int = 1
    retry_failed: bool = False
    kv_dtype: torch.dtype | None = None
    prompt_embeds: bool = False

    def tasks(self) -> list[AotTask]:
        """One per bucket: the rank is an input of every graph, so rank 0's graphs serve all."""
        return [AotTask(bucket.name, 0, bucket.cost) for bucket in self.plan.all()]

    def worker(self) -> Callable[[], AotWorker]:
        """Makes the worker, in its own process."""
        return functools.partial(ModelWorker, self)


class ModelWorker:
    """Holds the model on the meta device, where weights and caches have shapes and no memory."""

    def __init__(self, job: ModelCompile) -> None:
        self.job = job
        for_cpu = job.target == CPU_TARGET
        device = CpuDevice(cache_dir=job.cache_dir)
        if for_cpu:
            ops.load_kernels(job.cache_dir)
        with torch.device("meta"):
            model = build_model_for(
                job.plan,
                job.config,
                dtype=job.dtype,
                groups=_groups(job.parallel),
                kv_dtype=job.kv_dtype,
                prompt_embeds=job.prompt_embeds,
            )
        if isinstance(model, nn.Module):
            fit_to_chip(model, None if for_cpu else chip_for_target(job.target))
            if for_cpu:
                device.prepare(model)
        self.programs = ModelPrograms(model, job.plan, job.num_blocks)
        self.cache = configured_cache(Environment.read(), job.cache_dir)
        self.builder = GraphBuilder(
            device,
            self._compiler(),
            self.cache,
            passes=default_passes(torch.device("cpu") if for_cpu else neuron_torch_device()),
            jobs=job.jobs,
            retry_failed=job.retry_failed,
            load=False,
        )

    def compile(self, task: AotTask) -> Outcome:
        """Compile every program of a bucket, or, without the vendor's tools, keep its captured graphs."""
        bucket = next(bucket for bucket in self.job.plan.all() if bucket.name == task.bucket)
        missing = self._missing_tools()
        if missing:
            return self._capture(bucket, missing)
        stats = self.builder.stats
        before = (stats.captured, stats.compiled, stats.loaded)
        pending = [
            self.builder.submit(
                self.programs.program(bucket, variant), self.programs.specs(bucket), bucket=bucket.name
            )
            for variant in variants(bucket)
        ]
        graphs = [graph.key.digest for waiting in pending for graph in waiting.result().graphs]
        now = (stats.captured, stats.compiled, stats.loaded)
        captured, compiled, loaded = (after - earlier for after, earlier in zip(now, before, strict=True))
        return Outcome(captured, compiled, loaded, tuple(dict.fromkeys(graphs)))

    def _missing_tools(self) -> str:
        """What must be installed before this target can be compiled for; empty when nothing is missing."""
        if self.job.target == CPU_TARGET:
            return ""
        from neuron_core.graphs.compilers.neuronx import NeuronxCompiler
        from neuron_core.graphs.compilers.vendor_wheels import VendorToolsMissing

        assert isinstance(self.builder.compiler, NeuronxCompiler)
        try:
            self.builder.compiler.check_tools()
        except VendorToolsMissing as error:
            return str(error)
        return ""

    def _capture(self, bucket: Bucket, advice: str) -> Outcome:
        """Write each distinct graph to ``captured/<target>/<bucket>/<part>``."""
        from neuron_core.graphs.compilers.captured import write_captured

        folder = self.job.cache_dir / "captured" / self.job.target / bucket.name
        written: set[str] = set()
        for variant in variants(bucket):
            program = self.programs.program(bucket, variant)
            for graph in self.builder.capture_program(program, self.programs.specs(bucket), bucket.name):
                place = folder / graph.name
                if graph.name not in written:
                    place.mkdir(parents=True, exist_ok=True)
                    write_captured(graph, place)
                written.add(graph.name)
        return Outcome(len(written), 0, 0, (), advice)

    def _compiler(self) -> Compiler:
        job = self.job
        if job.target != CPU_TARGET:
            from neuron_core.graphs.compilers.neuronx import NeuronxCompiler

            return NeuronxCompiler(job.target, lnc=job.lnc, keep_dir=job.cache_dir / "captured" / job.target)
        return compiler_named(job.compiler, self.cache.toolchain_dir, job.cpu_threads)


def neuron_torch_device() -> torch.device:
    """``torch.device("neuron")``, which torch only knows once its private backend bears that name."""
    try:
        return torch.device("neuron")
    except RuntimeError:
        rename_privateuse1_backend("neuron")
        return torch.device("neuron")


def _groups(plan: ParallelPlan) -> ParallelGroups:
    """The groups of ``plan`` in a world whose other ranks do not exist: collectives are captured, never run."""
    if plan.world_size > 1 and not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=plan.world_size, store=FakeStore())
    return ParallelGroups.create(plan)
