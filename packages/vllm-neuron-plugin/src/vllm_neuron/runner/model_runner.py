# SPDX-License-Identifier: Apache-2.0
"""The conductor of one step: update rows, build inputs, run the graph, read the tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from neuron_core.graphs.buckets import BucketPlan
from neuron_core.metrics import NeuronMetrics
from neuron_core.step import StepInput
from vllm_neuron.runner.executor import GraphExecutor
from vllm_neuron.runner.host_sampling import resample
from vllm_neuron.runner.inputs import Batch, build, make_batch
from vllm_neuron.runner.logprobs import drawn_logprobs, prompt_logprobs, scores_of
from vllm_neuron.runner.requests import RequestTable


@dataclass(frozen=True)
class _Submitted:
    """A step whose graph has run and whose tokens have not been handed out."""

    batch: Batch
    step: StepInput
    outputs: dict[str, Tensor]


class NeuronModelRunner:
    """Runs what the scheduler asks for. It owns no arithmetic: its parts do."""

    def __init__(
        self,
        executor: GraphExecutor,
        plan: BucketPlan,
        metrics: NeuronMetrics,
        *,
        engine_seed: int,
        logprobs_mode: str,
        sample_on_device: bool,
    ) -> None:
        self.executor = executor
        self.plan = plan
        self.metrics = metrics
        self.sample_on_device = sample_on_device
        self.scores = scores_of(logprobs_mode)
        width = plan.context_len // plan.block_size
        self.table = RequestTable(plan.context_len, plan.block_size, width, engine_seed)
        self._submitted: _Submitted | None = None

    def execute_model(self, schedule: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run one step; None means that :meth:`sample_tokens` has its output."""
        self.table.update(schedule)
        self._prepare_blocks(schedule)
        if schedule.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT
        requests = [self.table.requests[request_id] for request_id in schedule.num_scheduled_tokens]
        batch = make_batch(self.table, self.plan, requests, list(schedule.num_scheduled_tokens.values()))
        step = build(self.table, batch, self.executor.rank)
        outputs = self.executor.run(batch.bucket, self._variant(batch), step.as_values())
        self._submitted = _Submitted(batch, step, outputs)
        self._count(batch)
        return None

    def sample_tokens(self) -> ModelRunnerOutput:
        """The output of the step that :meth:`execute_model` ran last."""
        submitted, self._submitted = self._submitted, None
        if submitted is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch, outputs = submitted.batch, submitted.outputs
        tokens = self._tokens(submitted)
        prompts = {}
        if any(request.wants_prompt_logprobs for request in batch.requests):
            prompts = prompt_logprobs(
                batch, self.table, outputs["hidden_states"], self.executor.logits, self.scores
            )
        logprobs = None
        if "logits" in outputs:
            logprobs = drawn_logprobs(outputs["logits"], tokens, batch.requests, self.scores)
        sampled = [
            [token] if draws else [] for token, draws in zip(tokens.tolist(), batch.draws, strict=False)
        ]
        for request, drawn in zip(batch.requests, sampled, strict=True):
            for token in drawn:
                self.table.append(request, token)
        ids = [request.request_id for request in batch.requests]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=logprobs,
            prompt_logprobs_dict=prompts,
        )

    def _prepare_blocks(self, schedule: SchedulerOutput) -> None:
        if schedule.new_block_ids_to_zero:
            self.executor.zero_blocks(schedule.new_block_ids_to_zero)
        if schedule.kv_cache_block_copies:
            self.executor.copy_blocks(
                [(c.src_block_id, c.dst_block_id) for c in schedule.kv_cache_block_copies]
            )

    def _tokens(self, submitted: _Submitted) -> Tensor:
        tokens = submitted.outputs["tokens"]
        requests = submitted.batch.requests
        rows = [i for i, request in enumerate(requests) if request.on_host or not self.sample_on_device]
        if not rows:
            return tokens
        return resample(submitted.outputs["logits"], tokens, submitted.step, self.table, requests, rows)

    def _variant(self, batch: Batch) -> str:
        """``greedy`` where only the likeliest token of each row is asked for: it pays nothing for sampling."""
        plain = self.sample_on_device and all(
            self.table.temperature[request.row] == 0.0
            and request.sampling.logprobs is None
            and not request.wants_prompt_logprobs
            and not request.on_host
            for request in batch.requests
        )
        return "greedy" if plain else "sample"

    def _count(self, batch: Batch) -> None:
        bucket = batch.bucket
        self.metrics.observe_step(
            bucket.name,
            padded_seqs=bucket.num_seqs - len(batch.requests),
            padded_tokens=bucket.num_tokens - int(batch.starts[-1]),
        )
