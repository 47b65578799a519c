# SPDX-License-Identifier: Apache-2.0
"""Bucket to compiled graph to device: the only part of the runner that touches graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from neuron_core.errors import UncompiledShapeError
from neuron_core.graphs.buckets import Bucket, BucketPlan, Phase
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.compiled import CompiledProgram, Watch
from neuron_core.graphs.model_programs import HIDDEN_STATES, ModelPrograms
from neuron_core.graphs.program import Program, TensorSpec
from neuron_core.graphs.taps import TappedProgram, Taps
from neuron_core.kv.layout import KVLayout
from neuron_core.logit_edits import no_edits
from neuron_core.prompt_embeds import only_tokens
from neuron_core.protocols import StaticModel
from neuron_core.sampling_state import RowEdits, SamplingState
from neuron_core.token_mask import allow_everything
from vllm_neuron.startup_times import StartupTimes

Progress = Callable[[int, int, Bucket, str], None]
"""Called with the graphs ready so far, how many there are, and the bucket and variant just made ready."""


class GraphExecutor:
    """The compiled graphs of one model, its KV tensors and its sampling state.

    With ``taps`` the programs of steps are tapped, which :meth:`tapped` tells of.
    """

    def __init__(
        self, model: StaticModel, plan: BucketPlan, builder: GraphBuilder, rank: int, taps: Taps | None = None
    ) -> None:
        self.model = model
        self.plan = plan
        self.builder = builder
        self.rank = rank
        self.taps = taps
        self._tapped: dict[tuple[Bucket, str], TappedProgram] = {}
        self._kv: dict[str, Tensor] = {}
        self._state: SamplingState | None = None
        self._everything: dict[int, Tensor] = {}
        self._no_edits: dict[int, dict[str, Tensor]] = {}
        self._only_tokens: dict[int, dict[str, Tensor]] = {}
        self._programs: dict[tuple[Bucket, str], CompiledProgram] = {}

    def allocate(self, layouts: Sequence[KVLayout], num_blocks: int, device: torch.device) -> None:
        """Make the KV tensors, one per layer, and the state rows of a model that draws tokens."""
        self._kv = {f"kv.{i}": layout.allocate(num_blocks, device) for i, layout in enumerate(layouts)}
        if not self.plan.pooling:
            self._state = SamplingState(self.plan.max_num_seqs, self.model.vocab_size, device)

    @property
    def kv_tensors(self) -> tuple[Tensor, ...]:
        """The cache of each layer, ``[num_blocks, kv_heads, block_size, 2 * head_dim]``."""
        return tuple(self._kv.values())

    @property
    def _kept(self) -> dict[str, Tensor]:
        """Every tensor that outlives a step, by its name among the inputs of programs."""
        return {**self._kv, **(self._state.tensors if self._state else {})}

    def write_state(self, row: int, edits: RowEdits) -> None:
        """Make a state row that of a request with ``edits``; see `SamplingState.write`."""
        if self._state is None:
            raise RuntimeError("this model draws no tokens, so it has no state rows")
        self._state.write(row, edits)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear blocks in every layer."""
        index = torch.tensor(block_ids)
        for cache in self._kv.values():
            cache.index_fill_(0, index, 0)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks ``(from, to)`` in every layer."""
        source, target = torch.tensor(pairs).unbind(1)
        for cache in self._kv.values():
            cache[target] = cache[source]

    def compile(self, progress: Progress, times: StartupTimes) -> None:
        """Compile or load every graph of the plan, and run each once on padding alone.

        All are submitted before the first is awaited, the longest first, so that compiles overlap. A graph that
        layers or buckets share runs once for all of them.
        """
        programs = self._programs_of_model()
        wanted = [(*which, self._program(programs, *which)) for which in programs.wanted()]
        with times.phase("capture"):
            pending = [
                self.builder.submit(
                    parts, {**programs.specs(bucket), **self._put_specs(bucket, variant)}, bucket=bucket.name
                )
                for bucket, variant, parts in wanted
            ]
        warmed: set[str] = set()
        for done, ((bucket, variant, parts), waiting) in enumerate(zip(wanted, pending, strict=True), 1):
            begun, compiled = time.perf_counter(), self.builder.stats.compiled
            program = waiting.result()
            waited = time.perf_counter() - begun
            times.spend("compile" if self.builder.stats.compiled > compiled else "artifact load", waited)
            program.bind({name: tensor for name, tensor in self._kept.items() if name in program.inputs})
            self._programs[bucket, variant] = program
            with times.phase("warm-up"):
                self._warm(bucket, variant, parts, program, warmed)
            progress(done, len(wanted), bucket, variant)
        self.builder.close()

    def run(
        self, bucket: Bucket, variant: str, values: Mapping[str, Tensor], watch: Watch | None = None
    ) -> dict[str, Tensor]:
        """Outputs of one graph by name; a shape outside the plan is an error, never a compile.

        With ``watch`` that runs the program's parts.
        """
        program = self._programs.get((bucket, variant))
        if program is None:
            raise UncompiledShapeError(f"no graph was compiled for {bucket} ({variant})")
        return program(values) if watch is None else program.watched(values, watch)

    def everything(self, num_seqs: int) -> Tensor:
        """The mask of ``num_seqs`` rows that bans nothing; the same tensor each time, which nobody may change."""
        if num_seqs not in self._everything:
            self._everything[num_seqs] = allow_everything(num_seqs, self.model.vocab_size)
        return self._everything[num_seqs]

    def no_edits(self, num_seqs: int) -> dict[str, Tensor]:
        """What a step without an edit says: the same tensors each time, which nobody may change."""
        if num_seqs not in self._no_edits:
            self._no_edits[num_seqs] = no_edits(num_seqs)
        return self._no_edits[num_seqs]

    def only_tokens(self, num_tokens: int) -> dict[str, Tensor]:
        """What a step of ``num_tokens`` without embeddings gives a model that takes them, and any other nothing.

        The same tensors each time, which nobody may change.
        """
        if num_tokens not in self._only_tokens:
            self._only_tokens[num_tokens] = only_tokens(num_tokens, self.model)
        return self._only_tokens[num_tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, V]`` float32 logits of any number of final hidden states ``[n, H]``."""
        bucket = self.plan.logits()
        found = []
        for begin in range(0, len(hidden), bucket.num_tokens):
            part = hidden[begin : begin + bucket.num_tokens]
            padded = torch.nn.functional.pad(part, (0, 0, 0, bucket.num_tokens - len(part)))
            found.append(self.run(bucket, "logits", {HIDDEN_STATES: padded})["logits"][: len(part)])
        return torch.cat(found)

    def _programs_of_model(self) -> ModelPrograms:
        num_blocks = len(self.kv_tensors[0]) if self._kv else 0
        return ModelPrograms(self.model, self.plan, num_blocks)

    def tapped(self, bucket: Bucket, variant: str) -> TappedProgram | None:
        """What of a program is tapped; None if nothing is."""
        return self._tapped.get((bucket, variant))

    def _program(self, programs: ModelPrograms, bucket: Bucket, variant: str) -> Program:
        program = programs.program(bucket, variant)
        if self.taps is None or bucket.phase is Phase.LOGITS:
            return program
        tapped = self.taps.apply(program, programs.specs(bucket), self.builder.device.torch_device)
        self._tapped[bucket, variant] = tapped
        return tapped.program

    def _put_specs(self, bucket: Bucket, variant: str) -> Mapping[str, TensorSpec]:
        tapped = self.tapped(bucket, variant)
        return tapped.put_specs if tapped is not None else {}

    def _warm(
        self, bucket: Bucket, variant: str, parts: Program, program: CompiledProgram, warmed: set[str]
    ) -> None:
        """Run the program's graphs that are not in ``warmed`` yet, on what padding alone would give them.

        Digests, not objects, are remembered: they are equal on all ranks, which meet in collectives.
        """
        values = self._padding(bucket)
        if (tapped := self.tapped(bucket, variant)) is not None:
            values.update(tapped.nothing_put())
        fresh = {}
        for part, graph in zip(parts.parts, program.graphs, strict=True):
            if graph.key.digest not in warmed:
                warmed.add(graph.key.digest)
                fresh[part] = graph
            for name, spec in zip(part.outputs, graph.output_specs, strict=True):
                values.setdefault(name, spec.empty("cpu").zero_())
        if fresh:
            outputs = tuple(fresh)[-1].outputs
            CompiledProgram(Program(tuple(fresh), outputs), tuple(fresh.values()))(values)

    def _padding(self, bucket: Bucket) -> dict[str, Tensor]:
        """Every input of the bucket's programs for a step without a token."""
        values = self._programs_of_model().padding(bucket, self.rank)
        return values if bucket.phase is Phase.LOGITS else {**values, **self._kept}
