# SPDX-License-Identifier: Apache-2.0
"""One rank of an engine: claims its device, loads its weights, compiles its graphs and runs its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from neuron_core.devices.discovery import open_device
from neuron_core.environ import Environment
from neuron_core.errors import ConfigError
from neuron_core.graphs.build import GraphBuilder
from neuron_core.memory import MemoryBudget, module_bytes, tensor_bytes
from neuron_core.metrics import NeuronMetrics
from neuron_core.protocols import StaticModel
from neuron_parallel import ParallelGroups, ParallelPlan
from vllm_neuron.config import bucket_plan, neuron_config
from vllm_neuron.graphs import graph_builder
from vllm_neuron.platform import discovered
from vllm_neuron.pooling.pooler import TextPooler
from vllm_neuron.pooling.runner import PoolingRunner
from vllm_neuron.pooling.settings import pooling_task
from vllm_neuron.profiling import rank_profiler
from vllm_neuron.progress import WarmUpProgress
from vllm_neuron.runner.executor import GraphExecutor
from vllm_neuron.runner.model_runner import NeuronModelRunner
from vllm_neuron.runner.observer import StepObserver
from vllm_neuron.runner.processors import custom_processors
from vllm_neuron.start_estimate import StartEstimates
from vllm_neuron.startup_times import StartupTimes
from vllm_neuron.unfilled import unfilled_model
from vllm_neuron.weights import fill_weights

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

logger = init_logger(f"vllm.{__name__}")

T = TypeVar("T")

KV_LAYOUT = "LBHNC"
"""vLLM's name of a cache of one tensor per layer: block, head, place in the block, keys then values."""


class NeuronWorker(WorkerBase):
    """vLLM's worker interface over the Neuron device or the CPU device."""

    model: StaticModel
    runner: NeuronModelRunner | PoolingRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times = StartupTimes()
        self.environment = Environment.read()
        self.settings = neuron_config(self.vllm_config)
        self.plan = bucket_plan(self.vllm_config)
        self.world_size = self.parallel_config.world_size
        self.neuron_device = open_device(discovered().device.name, self.environment)
        self.overlap = bool(self.vllm_config.scheduler_config.async_scheduling)
        self.stream = self.neuron_device.stream(overlap=self.overlap)
        self.metrics = NeuronMetrics(self.model_config.served_model_name, self.rank)
        self.profiler = rank_profiler(
            self.vllm_config.profiler_config, self.rank, self.world_size, self.neuron_device, self._on_stream
        )

    def init_device(self) -> None:
        """Claim the device and join the other ranks; raises ``DeviceError`` if the device cannot start."""
        self._on_stream(lambda: self.neuron_device.start(self.local_rank, self.world_size))
        self.device = self.neuron_device.torch_device
        init_distributed_environment(
            self.world_size, self.rank, self.distributed_init_method, self.local_rank, backend="gloo"
        )
        ensure_model_parallel_initialized(self.parallel_config.tensor_parallel_size, 1)
        self.groups = ParallelGroups.create(ParallelPlan(self.parallel_config.tensor_parallel_size))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Build the model and fill it.

        Raises ``CapacityError`` before a weight is read if they and one request cannot fit, and
        ``CheckpointError`` listing tensors that do not fit the model.
        """
        begun = time.perf_counter()
        self._require_fit()
        model = self._make_model(self.groups)
        if not isinstance(model, nn.Module):
            raise ConfigError("architectures", type(model).__name__, "the model must be a torch module")
        self.model = model
        read = fill_weights(
            model, self.vllm_config, self.groups.tp, dummy=load_dummy_weights, shown=self.rank == 0
        )
        self._on_stream(lambda: self.neuron_device.prepare(model))
        seconds, size = time.perf_counter() - begun, module_bytes([model])
        self.times.spend("load", seconds)
        self.metrics.model_loaded(seconds, size)
        speed = size / 1e9 / seconds
        logger.info(
            "rank %d loaded %.2f GB of weights in %.2f s (%.2f GB/s); %s",
            self.rank,
            size / 1e9,
            seconds,
            speed,
            read,
        )

    def _make_model(self, groups: ParallelGroups) -> StaticModel:
        return unfilled_model(self.vllm_config, self.neuron_device.chip, groups)

    def _require_fit(self) -> None:
        estimates = StartEstimates(self.vllm_config, self.neuron_device, self._make_model)
        estimate = estimates.own()
        estimate.require_fit(estimates.others())
        self.activation_bytes = estimate.footprint.activation_bytes
        if self.rank == 0:
            logger.info("%s", estimate.table())

    def get_model(self) -> nn.Module:
        """The model as a torch module."""
        model: nn.Module = self.model  # type: ignore[assignment]
        return model

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One full-attention layer spec per layer of the model."""
        return {
            f"kv.{index}": FullAttentionSpec(
                block_size=layout.block_size,
                num_kv_heads=layout.num_kv_heads,
                head_size=layout.head_dim,
                dtype=layout.dtype,
            )
            for index, layout in enumerate(self.model.kv_layouts)
        }

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """The one layout that the graphs are written for."""
        return [KV_LAYOUT]

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache of this rank; raises ``CapacityError`` if one request cannot fit."""
        budget = MemoryBudget.for_device(
            self.neuron_device,
            ranks_on_host=self.world_size,
            utilization=self.cache_config.gpu_memory_utilization,
            weights_bytes=module_bytes([self.get_model()]),
            activation_bytes=self.activation_bytes,
            requested_kv_bytes=self.cache_config.kv_cache_memory_bytes,
        )
        override = self.cache_config.num_gpu_blocks_override
        logger.info("%s", budget.describe(self.model.kv_layouts, override))
        budget.require_one_request(self.model_config.max_model_len, self.model.kv_layouts, override)
        return budget.kv_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV tensors and make the runner."""
        builder = self._on_stream(lambda: graph_builder(self.neuron_device, self.settings, self.environment))
        self.observer = self._make_observer(builder)
        taps = self.observer.taps if self.observer is not None else None
        executor = GraphExecutor(self.model, self.plan, builder, self.groups.tp.rank(), taps)
        executor.allocate(self.model.kv_layouts, kv_cache_config.num_blocks, self.neuron_device.torch_device)
        self.runner = self._pooling_runner(executor) if self.plan.pooling else self._model_runner(executor)

    def _make_observer(self, builder: GraphBuilder) -> StepObserver | None:
        """What looks into steps; its package is read only where the settings ask for it."""
        if not self.settings.observes:
            return None
        from vllm_neuron.accuracy.observer import accuracy_observer

        group = self.groups.tp
        return accuracy_observer(
            self.settings, self.get_model(), self.vllm_config, builder, rank=group.rank(), size=group.size
        )

    def _pooling_runner(self, executor: GraphExecutor) -> PoolingRunner:
        pooler = TextPooler(self.vllm_config, self.model)
        return PoolingRunner(executor, self.plan, self.metrics, self.stream, pooler, overlap=self.overlap)

    def _model_runner(self, executor: GraphExecutor) -> NeuronModelRunner:
        processors = custom_processors(self.vllm_config)
        if processors is not None and self.rank == 0:
            logger.warning(
                "%s: custom logits processors run on the host, so every token of every request is drawn there",
                ", ".join(processors.names),
            )
        return NeuronModelRunner(
            executor,
            self.plan,
            self.metrics,
            self.stream,
            engine_seed=self.model_config.seed or 0,
            logprobs_mode=self.model_config.logprobs_mode,
            sample_on_device=self.settings.on_device_sampling,
            overlap=self.overlap,
            processors=processors,
            observer=self.observer,
        )

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile or load every graph of the plan; after this a shape without a graph is an error."""
        begun = time.perf_counter()
        executor = self.runner.executor
        with WarmUpProgress(executor.builder.stats, self.metrics, shown=self.rank == 0) as progress:
            self._on_stream(lambda: executor.compile(progress, self.times))
        if self.observer is not None:
            self.observer.check()
        seconds = time.perf_counter() - begun
        self.metrics.cache_used(asdict(executor.builder.cache.counters))
        self.metrics.device_memory(self._memory())
        self.metrics.started(self.times.total(), self.times.phases())
        if self.rank == 0:
            logger.info("%s", progress.summary(seconds))
            logger.info("%s", self.times.summary())
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def _memory(self) -> dict[str, int]:
        """Bytes by kind: tensors as they are, and of what a step may hold besides the bound it was planned with."""
        return {
            "weights": module_bytes([self.get_model()]),
            "kv_cache": tensor_bytes(self.runner.executor.kv_tensors),
            "activations": self.activation_bytes,
        }

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Text generation; with ``--runner pooling`` embedding, or classifying if the checkpoint has a head for it."""
        return (pooling_task(self.vllm_config),) if self.plan.pooling else ("generate",)

    @torch.no_grad()
    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Submit a step; None when it draws tokens, because vLLM then asks ``sample_tokens`` in every mode."""
        if self.profiler is not None:
            self.profiler.step_of(scheduler_output)
        return self.runner.execute_model(scheduler_output)

    @torch.no_grad()
    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """The output of the step submitted last; with asynchronous scheduling a promise of it."""
        return self.runner.sample_tokens(grammar_output)

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop a profile; see ``RankProfiler.profile`` for what it raises."""
        if self.profiler is None:
            hint = "profiling is off; start with --profiler-config.profiler torch and a torch_profiler_dir"
            raise ConfigError("--profiler-config.profiler", None, hint)
        self.profiler.profile(is_start, profile_prefix, delay_iterations, max_iterations)

    def begin_capture(self, folder: str) -> None:
        """Write what the engine captures to another folder from now on, steps counted from 0."""
        recorder = getattr(self.observer, "recorder", None)
        if recorder is None:
            hint = "needs an engine with neuron_config.tensor_capture"
            raise ConfigError("begin_capture", folder, hint)
        self._on_stream(lambda: recorder.begin(Path(folder)))

    def end_observation(self) -> str | None:
        """End a capture: what has ended since the last step is written too.

        Returns why nothing had been written any more before, if so; a problem of writing ends no engine.
        """
        return self.runner.end_observation() if isinstance(self.runner, NeuronModelRunner) else None

    def replace_modules(self, modules: list[str]) -> None:
        """Take these modules' outputs from the capture that ``tensor_replacement`` names; raises ``ConfigError``."""
        replacement = self._replacement()
        self._on_stream(lambda: replacement.choose(modules))

    def replaceable_modules(self) -> list[str]:
        """Modules that ``replace_modules`` takes, in the order they run."""
        candidates: list[str] = self._replacement().candidates
        return candidates

    def _replacement(self) -> Any:
        replacement = getattr(self.observer, "replacement", None)
        if replacement is None:
            raise ConfigError(
                "neuron_config.tensor_replacement", None, "is not set; name a capture's folder and modules"
            )
        return replacement

    def synchronize_device(self) -> None:
        """Wait for the device and for everything submitted to it."""
        self._on_stream(self.neuron_device.synchronize)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Refused: the graphs' shapes follow from the length, which must be known before they are made."""
        raise ConfigError("max_model_len", -1, f"automatic lengths are not supported; use {max_model_len}")

    def execute_dummy_batch(self) -> None:
        """Nothing to do: no rank outside this engine waits for it."""

    def shutdown(self) -> None:
        """Write a profile that is open, and let the stream end; all else is released by the end of the process."""
        if self.profiler is not None:
            self.profiler.shutdown()
        self.stream.close()

    def _on_stream(self, work: Callable[[], T]) -> T:
        """Run ``work`` where executions run: threads are bound, and counted, from the thread that starts the device."""
        return self.stream.submit(torch.no_grad()(work)).result()
