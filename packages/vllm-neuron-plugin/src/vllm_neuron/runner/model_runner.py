# SPDX-License-Identifier: Apache-2.0
"""The conductor of one step: update rows, build inputs, submit the graph, hand out the tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from neuron_core.devices.stream import Execution, Stream
from neuron_core.graphs.buckets import BucketPlan
from neuron_core.metrics import NeuronMetrics
from neuron_core.profiling.timeline import Kind, timed
from vllm_neuron.runner.edits import StateRows
from vllm_neuron.runner.executor import GraphExecutor
from vllm_neuron.runner.feed import make_feed
from vllm_neuron.runner.grammar import allowed_tokens
from vllm_neuron.runner.host_sampling import host_rows
from vllm_neuron.runner.inputs import Batch, build, scheduled_batch
from vllm_neuron.runner.logprobs import prompt_parts, scores_of
from vllm_neuron.runner.observer import StepObserver
from vllm_neuron.runner.output import StepOutput, wait_for
from vllm_neuron.runner.processors import CustomProcessors
from vllm_neuron.runner.prompt_embeds import embedding_inputs
from vllm_neuron.runner.requests import Request, RequestTable
from vllm_neuron.runner.step import BlockChanges, Step, StepResult


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A submitted step, and where in the table its tokens will go: one place per request, or None."""

    step: Step
    execution: Execution[StepResult]
    places: tuple[int | None, ...]
    follows: bool
    """Whether it goes on with a request of the step before, so that the time between them is the host's."""
    overlapped: bool
    """Whether it was submitted before the tokens of the step before were known."""


class NeuronModelRunner:
    """Runs what the scheduler asks for. It owns no arithmetic: its parts do.

    With ``overlap`` a step's output is handed out before the step has run, and the next step is submitted without
    the host having read its tokens; see ``docs/async-execution.md``.
    """

    def __init__(
        self,
        executor: GraphExecutor,
        plan: BucketPlan,
        metrics: NeuronMetrics,
        stream: Stream,
        *,
        engine_seed: int,
        logprobs_mode: str,
        sample_on_device: bool,
        overlap: bool = False,
        processors: CustomProcessors | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self.executor = executor
        self.plan = plan
        self.metrics = metrics
        self.stream = stream
        self.sample_on_device = sample_on_device and processors is None
        self.processors = processors
        self.observer = observer
        self.state_rows = StateRows(plan.max_num_seqs)
        self.overlap = overlap
        self.scores = scores_of(logprobs_mode)
        width = plan.context_len // plan.block_size
        self.table = RequestTable(plan.context_len, plan.block_size, width, engine_seed)
        self._in_flight: deque[_InFlight] = deque()
        self._last_ended = 0.0
        self._last_requests: frozenset[Request] = frozenset()
        self._output: StepOutput | None = None
        self._awaits_grammar: tuple[Batch, BlockChanges] | None = None

    @timed("execute model", Kind.BUILD)
    def execute_model(self, schedule: SchedulerOutput) -> ModelRunnerOutput | None:
        """Submit one step; None means that :meth:`sample_tokens` has its output."""
        self._collect(most_left=1)
        if self.observer is not None:
            self._tell(self.observer, schedule.finished_req_ids, schedule.preempted_req_ids or ())
        self.table.update(schedule)
        self.state_rows.release(self.table.requests, tuple(schedule.preempted_req_ids or ()))
        blocks = BlockChanges.of(schedule)
        if schedule.total_num_scheduled_tokens == 0:
            if blocks:
                self.stream.submit(lambda: blocks.apply(self.executor)).result()
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch = scheduled_batch(self.table, self.plan, schedule)
        if schedule.has_structured_output_requests:
            self._awaits_grammar = (batch, blocks)  # the masks are inputs, and come with sample_tokens
        else:
            self._submit(self._make_step(batch, blocks))
        batch.count(self.metrics)
        return None

    def sample_tokens(
        self, grammar: GrammarOutput | None = None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """The output of the step that :meth:`execute_model` was given last; with ``overlap`` it is yet to be read.

        ``grammar`` holds the masks of requests with structured outputs; their steps are submitted only now.
        """
        if self._awaits_grammar is not None:
            (batch, blocks), self._awaits_grammar = self._awaits_grammar, None
            self._collect(most_left=1)
            vocab_size = self.executor.model.vocab_size
            allowed = allowed_tokens(grammar, batch.requests, batch.bucket.num_seqs, vocab_size)
            self._submit(self._make_step(batch, blocks, allowed))
        output, self._output = self._output, None
        if output is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        if self.overlap:
            return output
        self._collect(most_left=0)
        return output.get_output()

    def end_observation(self) -> str | None:
        """Let the observer take what is left: requests that have ended without a step since.

        Returns why it had stopped before, if it had.
        """
        if self.observer is None:
            return None
        self._tell(self.observer, tuple(self.table.requests), ())
        return self.observer.close()

    def _tell(self, observer: StepObserver, finished: Iterable[str], preempted: Iterable[str]) -> None:
        ended = [self.table.requests[name] for name in finished if name in self.table.requests]
        if ended:  # the host knows all their tokens, and no step runs meanwhile
            self._collect(most_left=0)
            caches = self.executor.kv_tensors
            self.stream.submit(lambda: observer.ended(self.table, ended, caches)).result()
        observer.preempted(tuple(preempted))

    @timed("build inputs", Kind.BUILD)
    def _make_step(self, batch: Batch, blocks: BlockChanges, allowed: Tensor | None = None) -> Step:
        before = self._in_flight[-1].step if self._in_flight else None
        earlier = before.batch.requests if before is not None else ()
        feed = make_feed(self.table, batch, earlier)
        hosted = [
            row
            for row, (request, draws) in enumerate(zip(batch.requests, batch.draws, strict=True))
            if draws and self._on_host(request)
        ]
        rows = host_rows(self.table, batch.requests, hosted, earlier)
        edited = [request for request in batch.requests if request.is_edited and not self._on_host(request)]
        needs_tokens = bool(feed) or any(row.earlier_row is not None for row in rows)
        return Step(
            self.executor,
            batch,
            "sample" if allowed is not None else self._variant(batch),
            build(self.table, batch, self.executor.rank, feed),
            self.scores,
            blocks,
            state_writes=self.state_rows.assign(self.table, edited),
            edits=self.state_rows.inputs(self.table, batch) if edited else None,
            feed=feed,
            host_rows=rows,
            processors=self.processors,
            prompts=prompt_parts(batch, self.table.num_computed),
            allowed=allowed,
            embeds=embedding_inputs(
                batch, self.table.num_computed, self.executor.only_tokens(batch.bucket.num_tokens)
            ),
            earlier=before if needs_tokens else None,
            observer=self.observer,
            table=self.table if self.observer is not None else None,
        )

    def _on_host(self, request: Request) -> bool:
        return request.on_host or not self.sample_on_device

    @timed("submit", Kind.SUBMIT, lambda runner, step: {"step": step.number})
    def _submit(self, step: Step) -> None:
        batch, execution = step.batch, self.stream.submit(step.run)
        places = tuple(
            self.table.append(request) if draws else None
            for request, draws in zip(batch.requests, batch.draws, strict=True)
        )
        follows = not self._last_requests.isdisjoint(batch.requests)
        self._last_requests = frozenset(batch.requests)
        self._in_flight.append(_InFlight(step, execution, places, follows, bool(self._in_flight)))
        self._output = StepOutput(batch, execution, self.scores)

    def _collect(self, most_left: int) -> None:
        """Put the tokens of steps that have run in their places; wait until at most ``most_left`` have not."""
        while self._in_flight and (len(self._in_flight) > most_left or self._in_flight[0].execution.done()):
            self._read(self._in_flight.popleft())

    @timed("read tokens", Kind.OUTPUT)
    def _read(self, ran: _InFlight) -> None:
        result = wait_for(ran.execution)
        tokens = result.tokens.tolist()
        for request, place, token in zip(ran.step.batch.requests, ran.places, tokens, strict=False):
            if place is not None:
                self.table.fill(request, place, token)
        if ran.follows:
            self.metrics.host_gap(max(0.0, ran.execution.started - self._last_ended))
        self._last_ended = ran.execution.ended
        if ran.overlapped:
            self.metrics.async_step(fell_back=result.waited)

    def _variant(self, batch: Batch) -> str:
        """``greedy`` where only the likeliest token of each row is asked for: it pays nothing for sampling."""
        plain = self.sample_on_device and all(
            self.table.temperature[request.row] == 0.0
            and request.sampling.logprobs is None
            and not request.wants_prompt_logprobs
            and not request.is_edited
            for request in batch.requests
        )
        return "greedy" if plain else "sample"
