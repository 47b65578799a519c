# SPDX-License-Identifier: Apache-2.0
"""The conductor of a pooling model's step: update rows, build inputs, submit the graph, hand out what is pooled."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from neuron_core.devices.stream import Execution, Stream
from neuron_core.graphs.buckets import BucketPlan
from neuron_core.graphs.model_programs import HIDDEN_STATES
from neuron_core.metrics import NeuronMetrics
from neuron_core.profiling.timeline import Kind, timed
from neuron_core.step import StepInput
from neuron_models.pooling_program import HIDDEN
from vllm_neuron.pooling.inputs import build_uncached
from vllm_neuron.pooling.pooler import TextPooler, Texts
from vllm_neuron.runner.executor import GraphExecutor
from vllm_neuron.runner.inputs import Batch, build, scheduled_batch
from vllm_neuron.runner.output import wait_for
from vllm_neuron.runner.requests import Request, RequestTable
from vllm_neuron.runner.step import BlockChanges


@dataclass(frozen=True, eq=False)
class PoolingStep:
    """A submitted step; it shares nothing with the table."""

    executor: GraphExecutor
    batch: Batch
    inputs: StepInput
    blocks: BlockChanges

    @timed("step", Kind.STEP, lambda step: {"bucket": step.batch.bucket.name})
    @torch.no_grad()
    def run(self) -> Tensor:
        """``hidden_states [T, hidden]``; raises what the graph raises."""
        self.blocks.apply(self.executor)
        return self._run_graph()

    @timed(lambda step: step.batch.bucket.name, Kind.GRAPH)
    def _run_graph(self) -> Tensor:
        return self.executor.run(self.batch.bucket, HIDDEN, self.inputs.as_values())[HIDDEN_STATES]


class PoolingOutput(AsyncModelRunnerOutput):
    """What a submitted step gives its texts, pooled by whoever asks for them."""

    def __init__(self, execution: Execution[Tensor], texts: Texts, pooler: TextPooler) -> None:
        self._execution = execution
        self._texts = texts
        self._pooler = pooler

    @timed("output", Kind.OUTPUT)
    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step and pool it; raises what the step raised."""
        pooled = self._pooler(wait_for(self._execution), self._texts)
        ids = list(self._texts.request_ids)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            pooler_output=pooled,
        )


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A submitted step that has not been counted yet."""

    execution: Execution[Tensor]
    overlapped: bool
    """Whether the one before still ran when this was submitted."""
    follows: bool
    """Whether the device could have gone on with it at once: it overlaps, or computes more of the same texts."""


class PoolingRunner:
    """Runs what the scheduler asks for of a model that embeds or classifies.

    With ``overlap`` a step's output is handed out before the step has run.
    """

    def __init__(
        self,
        executor: GraphExecutor,
        plan: BucketPlan,
        metrics: NeuronMetrics,
        stream: Stream,
        pooler: TextPooler,
        *,
        overlap: bool = False,
    ) -> None:
        self.executor = executor
        self.plan = plan
        self.metrics = metrics
        self.stream = stream
        self.pooler = pooler
        self.overlap = overlap
        width = plan.context_len // plan.block_size
        self.table = RequestTable(plan.context_len, plan.block_size, width, engine_seed=0)
        self._in_flight: deque[_InFlight] = deque()
        self._last_ended = 0.0
        self._last_requests: frozenset[Request] = frozenset()

    @timed("execute model", Kind.BUILD)
    def execute_model(self, schedule: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Submit one step and return its output; vLLM asks for no tokens of a pooling model.

        Raises what an earlier step raised: of several ranks only one is asked for outputs.
        """
        self._count_ended()
        self.table.update(schedule)
        blocks = BlockChanges.of(schedule)
        if schedule.total_num_scheduled_tokens == 0:
            if blocks:
                self.stream.submit(lambda: blocks.apply(self.executor)).result()
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch = scheduled_batch(self.table, self.plan, schedule)
        texts = Texts.of(self.table, batch)
        execution = self._submit(PoolingStep(self.executor, batch, self._inputs(batch), blocks))
        output = PoolingOutput(execution, texts, self.pooler)
        return output if self.overlap else output.get_output()

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Nothing: there are no tokens."""
        return EMPTY_MODEL_RUNNER_OUTPUT

    def _submit(self, step: PoolingStep) -> Execution[Tensor]:
        self._count_ended()
        overlapped = bool(self._in_flight)
        execution = self.stream.submit(step.run)
        requests = step.batch.requests
        follows = overlapped or not self._last_requests.isdisjoint(requests)
        self._last_requests = frozenset(requests)
        self._in_flight.append(_InFlight(execution, overlapped, follows))
        step.batch.count(self.metrics)
        return execution

    def _count_ended(self) -> None:
        """Record the steps that have run; raises what one of them raised."""
        while self._in_flight and self._in_flight[0].execution.done():
            ran = self._in_flight.popleft()
            ran.execution.result()
            if ran.follows:
                self.metrics.host_gap(max(0.0, ran.execution.started - self._last_ended))
            self._last_ended = ran.execution.ended
            if ran.overlapped:
                self.metrics.async_step(fell_back=False)  # no text waits for what another gives

    def _inputs(self, batch: Batch) -> StepInput:
        make = build if self.executor.kv_tensors else build_uncached
        return make(self.table, batch, self.executor.rank)
