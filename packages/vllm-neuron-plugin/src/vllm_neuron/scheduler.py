# SPDX-License-Identifier: Apache-2.0
"""The scheduler: every step is all prefill or all decode, and fits a compiled bucket.

vLLM mixes prompt chunks and decode tokens in one step; a static graph computes one or the other. So before
each step this scheduler chooses a phase, takes the requests of the other phase out of ``running``, lets
vLLM's own scheduler decide all else (blocks, preemption, prefix hits, chunks), and puts them back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from neuron_core.errors import NeuronError
from neuron_core.graphs.buckets import Phase
from neuron_core.metrics import NeuronMetrics
from vllm_neuron.config import bucket_plan, neuron_config
from vllm_neuron.profiling import ScheduleTimes

__all__ = ["MixedStepError", "NeuronScheduler", "in_prefill"]

RETRY_AFTER_STEPS = 16
"""Decode steps after which an admission that failed is tried again although nothing visible has changed."""


class MixedStepError(NeuronError):
    """A step holds requests of both phases: a defect of the scheduler, never the user's."""


def in_prefill(request: Request) -> bool:
    """Whether a running request still has known tokens to compute before it samples its next one."""
    remaining = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
    return bool(request.is_prefill_chunk or remaining > 1)


class _HeldBack(list[Request]):
    """``running`` while other requests are held back from it.

    True even when empty: vLLM keeps its block watermark free only while something is running.
    """

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class _Refusal:
    """An admission that failed for want of blocks: tried again only once one of these has changed."""

    request_id: str
    free_blocks: int
    decode_step: int


class NeuronScheduler(AsyncScheduler):
    """vLLM's scheduler with prefill-only and decode-only steps; serves synchronous and asynchronous engines.

    Prefill goes first, packing up to ``max_prefill_seqs`` requests and the largest prefill bucket's tokens in
    a step; longer prompts take several. Decodes run when no prompt can be computed, and at the latest after
    ``max_consecutive_prefills`` prefill steps. A pooling model has prefill steps only.
    """

    running: list[Request]
    max_num_active_reqs: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.plan = bucket_plan(self.vllm_config)
        self.max_consecutive_prefills = neuron_config(self.vllm_config).max_consecutive_prefills
        self._consecutive_prefills = 0
        self._decode_steps = 0
        self._refusal: _Refusal | None = None
        self._metrics = NeuronMetrics(self.vllm_config.model_config.served_model_name, 0)
        self._metrics.preempted(0)  # a rate needs the zero before the first
        self._metrics.prefix_cache_skipped(0)
        self._times = ScheduleTimes.wanted(self.vllm_config.profiler_config)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step of one phase; raises a ``NeuronError`` if it would mix phases or fit no compiled shape."""
        begun = time.perf_counter_ns()
        phase = self._choose_phase(throttle_prefills)
        visible = self._visible(phase)
        shown = set(visible)
        held = {request for request in self.running if request not in shown}
        with self._only(visible, held, phase):
            output = super().schedule(throttle_prefills)
        self._verify(output, phase, held)
        self._remember(output, phase, held)
        self._record(output)
        if self._times is not None:
            self._times.scheduled(begun, output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's; requests that finish here free blocks, and no step may follow that would say so."""
        begun = time.perf_counter_ns()
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        self._record_blocks()
        if self._times is not None:
            self._times.updated(begun, idle=not self.has_unfinished_requests())
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """As vLLM's, for aborts and stop strings, which free blocks too."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        self._record_blocks()
        return finished

    def _record(self, output: SchedulerOutput) -> None:
        self._record_blocks()
        if output.preempted_req_ids:
            self._metrics.preempted(len(output.preempted_req_ids))
        if output.scheduled_new_reqs and self.kv_cache_manager.enable_caching:
            # Who comes back from a preemption is not new, so that a request counts once.
            new = (self.requests[request.req_id] for request in output.scheduled_new_reqs)
            self._metrics.prefix_cache_skipped(sum(request.skip_reading_prefix_cache for request in new))

    def _record_blocks(self) -> None:
        self._metrics.kv_blocks(self.kv_cache_config.num_blocks - 1, self._num_free_blocks)

    def _choose_phase(self, throttle_prefills: bool) -> Phase:
        num_decoding = sum(not in_prefill(request) for request in self.running)
        if num_decoding == 0 or self.plan.pooling:
            return Phase.PREFILL
        if self._consecutive_prefills >= self.max_consecutive_prefills:
            return Phase.DECODE
        if throttle_prefills and not self.prefill_capacity_bound:
            return Phase.DECODE
        mid_flight = num_decoding < len(self.running)
        return Phase.PREFILL if mid_flight or self._may_admit() else Phase.DECODE

    def _may_admit(self) -> bool:
        """Whether trying to admit the next waiting request is worth holding the decodes back."""
        if len(self.running) + self.num_waiting_for_streaming_input >= self.max_num_active_reqs:
            return False
        request = self._next_ready()
        if request is None:
            return False
        refusal = self._refusal
        return (
            refusal is None
            or request.request_id != refusal.request_id
            or self._num_free_blocks > refusal.free_blocks
            or self._decode_steps >= refusal.decode_step + RETRY_AFTER_STEPS
        )

    def _next_ready(self) -> Request | None:
        """The request vLLM's scan of the waiting queues would try first."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return None
        waiting = self.waiting if self._pause_state == PauseState.UNPAUSED else ()
        return next((r for r in chain(self.kv_holding_waiting, waiting) if self._is_ready(r)), None)

    def _is_ready(self, request: Request) -> bool:
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return False
        # Also turns a request whose grammar or remote KV has arrived into a plain waiting one.
        return bool(self._handle_blocked_waiting_request(request))

    @property
    def _num_free_blocks(self) -> int:
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    def _visible(self, phase: Phase) -> list[Request]:
        if phase is Phase.DECODE:
            return [r for r in self.running if not in_prefill(r)]
        prefills = [r for r in self.running if in_prefill(r)]
        return prefills[: self.plan.max_prefill_seqs]

    @contextmanager
    def _only(self, visible: list[Request], held: set[Request], phase: Phase) -> Iterator[None]:
        """Show vLLM's scheduler only ``visible``, under the limits of the phase's largest bucket."""
        before = self.running
        limits = (self.max_num_active_reqs, self.max_num_scheduled_tokens)
        self.running = _HeldBack(visible) if held else visible
        self._set_limits(phase, num_held=len(held))
        try:
            yield
        finally:
            self.running = _merged(before, held, self.running)
            self.max_num_active_reqs, self.max_num_scheduled_tokens = limits

    def _set_limits(self, phase: Phase, num_held: int) -> None:
        if phase is Phase.DECODE:
            # Nothing is admitted: vLLM's scan of the waiting queues ends before it looks at them.
            self.max_num_active_reqs = 0
            largest_step = self.plan.max_num_seqs
        else:
            rows = self.plan.max_prefill_seqs + self.num_waiting_for_streaming_input
            self.max_num_active_reqs = min(self.max_num_active_reqs - num_held, rows)
            largest_step = self.plan.max_prefill_tokens
        self.max_num_scheduled_tokens = min(self.max_num_scheduled_tokens, largest_step)

    def _verify(self, output: SchedulerOutput, phase: Phase, held: set[Request]) -> None:
        counts = output.num_scheduled_tokens
        if not counts:
            return
        strangers = {request.request_id for request in held} & counts.keys()
        if phase is Phase.PREFILL:
            self.plan.prefill(output.total_num_scheduled_tokens, len(counts))
        else:
            self.plan.decode(len(counts))
            strangers |= {request_id for request_id, count in counts.items() if count != 1}
            strangers |= {request.req_id for request in output.scheduled_new_reqs}
            strangers |= set(output.scheduled_cached_reqs.resumed_req_ids)
        if strangers:
            raise MixedStepError(f"{phase} step holds requests of another phase: {sorted(strangers)}")

    def _remember(self, output: SchedulerOutput, phase: Phase, held: set[Request]) -> None:
        if phase is Phase.DECODE:
            self._decode_steps += 1
            self._consecutive_prefills = 0
        elif output.total_num_scheduled_tokens:
            self._refusal = None
            self._consecutive_prefills = self._consecutive_prefills + 1 if held else 0
        elif held:
            # No prompt could be computed, so the next step is the decodes', which free blocks as they finish.
            self._consecutive_prefills = self.max_consecutive_prefills
            if (request := self._next_ready()) is not None:
                self._refusal = _Refusal(request.request_id, self._num_free_blocks, self._decode_steps)


def _merged(before: list[Request], held: set[Request], after: list[Request]) -> list[Request]:
    """``running`` after a step: what remains in its old order (vLLM preempts from the end), then the new."""
    remaining, known = set(after), set(before)
    kept = [request for request in before if request in held or request in remaining]
    return kept + [request for request in after if request not in known]
