# SPDX-License-Identifier: Apache-2.0
"""One step as the device's stream runs it: from inputs, some of which the step before draws, to tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as data_field

import torch
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsTensors

from neuron_core.ops.reference import mask_logits
from neuron_core.profiling.timeline import Kind, timed
from neuron_core.step import StepInput
from neuron_core.token_mask import ALLOWED_TOKENS
from vllm_neuron.runner.edits import StateWrite
from vllm_neuron.runner.executor import GraphExecutor
from vllm_neuron.runner.feed import Feed
from vllm_neuron.runner.host_sampling import HostRow, resample
from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.logprobs import PromptPart, Scores, score_prompts
from vllm_neuron.runner.observer import StepObserver
from vllm_neuron.runner.processors import CustomProcessors
from vllm_neuron.runner.requests import RequestTable


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step leaves on the device, and whether it had to wait for the host."""

    tokens: Tensor
    """int32 ``[R]``."""
    logits: Tensor | None
    """float32 ``[R, V]`` before any edit but a grammar's, or None if the graph gives none."""
    prompt_logprobs: dict[str, LogprobsTensors | None]
    waited: bool
    """Whether tokens of the step before were read and merged on the host."""


@dataclass(frozen=True)
class BlockChanges:
    """Blocks to clear and to copy ``(from, to)`` before a step reads them."""

    zeroed: Sequence[int] = ()
    copied: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, schedule: SchedulerOutput) -> BlockChanges:
        """Those that the scheduler asks for."""
        copies = schedule.kv_cache_block_copies or ()
        return cls(
            tuple(schedule.new_block_ids_to_zero or ()),
            tuple((copy.src_block_id, copy.dst_block_id) for copy in copies),
        )

    def __bool__(self) -> bool:
        return bool(self.zeroed or self.copied)

    def apply(self, executor: GraphExecutor) -> None:
        """Make them, on the stream, so that no step in flight sees them early."""
        if self.zeroed:
            executor.zero_blocks(self.zeroed)
        if self.copied:
            executor.copy_blocks(self.copied)


@dataclass(eq=False)
class Step:
    """A submitted step. It shares nothing with the table, which goes on changing while the step waits its turn."""

    executor: GraphExecutor
    batch: Batch
    variant: str
    inputs: StepInput
    scores: Scores
    blocks: BlockChanges = BlockChanges()
    state_writes: Sequence[StateWrite] = ()
    edits: Mapping[str, Tensor] | None = None
    """What it says of edits, as `neuron_core.logit_edits` has it; None if no logit is edited."""
    feed: Feed | None = None
    host_rows: Sequence[HostRow] = ()
    processors: CustomProcessors | None = None
    prompts: Sequence[PromptPart] = ()
    allowed: Tensor | None = None
    """int32 ``[R, ceil(V / 32)]``, the tokens that grammars leave; None if no request has one."""
    embeds: Mapping[str, Tensor] = data_field(default_factory=dict)
    """Prompt embeddings and where they go, as `neuron_core.prompt_embeds` has it; empty if the model takes none."""
    earlier: Step | None = None
    """The step whose tokens ``feed`` and ``host_rows`` read."""
    observer: StepObserver | None = None
    table: RequestTable | None = None
    """What an observer may read of the batch's requests: their rows stay theirs until the step has run."""
    tokens: Tensor | None = data_field(default=None, init=False)
    """int32 ``[R]``, once it has run."""
    number: int = data_field(default_factory=itertools.count().__next__, init=False)
    """How many steps this process made before it."""

    @timed("step", Kind.STEP, lambda step: step.describe())
    @torch.no_grad()
    def run(self) -> StepResult:
        """Run the step. Raises what its graph raises, and ``RuntimeError`` if the step before failed."""
        earlier, self.earlier = self.earlier, None  # or each step would keep all before it
        drawn = None if earlier is None else earlier.tokens
        if earlier is not None and drawn is None:
            raise RuntimeError("the step before this one failed, and this one needs its tokens")
        self.blocks.apply(self.executor)
        for write in self.state_writes:
            self.executor.write_state(write.row, write.edits)
        values, waited = self.inputs.as_values(), False
        allowed = self.allowed if self.allowed is not None else self.executor.everything(self.inputs.num_seqs)
        values[ALLOWED_TOKENS] = allowed
        values.update(self.edits or self.executor.no_edits(self.inputs.num_seqs))
        values.update(self.embeds)
        if self.feed and drawn is not None:
            num_tokens = int(self.batch.starts[-1])
            values["token_ids"], waited = self.feed.apply(values["token_ids"], num_tokens, drawn)
        outputs = self._run_graph(values)
        tokens, logits = outputs["tokens"], outputs.get("logits")
        if self.host_rows and logits is not None:
            given = (logits, tokens, self.inputs, allowed, self.host_rows, drawn, self.processors)
            tokens = _resample(*given)
        self.tokens = tokens
        prompts = {}
        if self.prompts:
            prompts = _score_prompts(self.prompts, outputs["hidden_states"], self._logits, self.scores)
        if self.allowed is not None and logits is not None:
            logits = mask_logits(logits, self.allowed)  # as vLLM, which reports what the grammar left
        return StepResult(tokens, logits, prompts, waited)

    def describe(self) -> dict[str, object]:
        """What a profile says of it."""
        about = {"step": self.number, "bucket": self.batch.bucket.name, "variant": self.variant}
        return {**about, "requests": len(self.batch.requests), "tokens": int(self.batch.starts[-1])}

    @timed(lambda step, _: step.batch.bucket.name, Kind.GRAPH, lambda step, _: step.describe())
    def _run_graph(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.observer is not None and self.table is not None:
            return self._run_observed(values, self.observer, self.table)
        return self.executor.run(self.batch.bucket, self.variant, values)

    def _run_observed(
        self, values: Mapping[str, Tensor], observer: StepObserver, table: RequestTable
    ) -> dict[str, Tensor]:
        program = self.executor.tapped(self.batch.bucket, self.variant)
        assert program is not None, "an executor of an observed runner taps every step"
        puts = observer.puts(program, self.batch, values, table)
        watch = observer.watch(program, self.batch, values)
        outputs = self.executor.run(self.batch.bucket, self.variant, {**values, **puts}, watch)
        observer.ran(program, self.batch, values, outputs, table)
        return outputs

    @timed(lambda step, _: step.executor.plan.logits().name, Kind.GRAPH)
    def _logits(self, hidden: Tensor) -> Tensor:
        return self.executor.logits(hidden)


_resample = timed("host rows", Kind.SAMPLING)(resample)
_score_prompts = timed("prompt logprobs", Kind.SAMPLING)(score_prompts)
