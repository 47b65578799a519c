# SPDX-License-Identifier: Apache-2.0
"""Builds programs: shares equal parts, asks the cache, captures and compiles only what is missing."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from neuron_core.devices.host import ALLOWED_CPUS
from neuron_core.errors import CacheError, CompileError, NotCompiledError
from neuron_core.graphs.cache import CacheEntry, CompileCache
from neuron_core.graphs.capture import CapturedGraph, SharedInputs, capture
from neuron_core.graphs.compiled import CompiledGraph, CompiledProgram
from neuron_core.graphs.key import canonical_text, graph_key, key_facts
from neuron_core.graphs.miss import explain_miss
from neuron_core.graphs.passes import PassManager, default_passes, repeated_inputs
from neuron_core.graphs.program import KV_PREFIX, Part, Program, TensorSpec
from neuron_core.graphs.requests import GraphRecord, request_key
from neuron_core.graphs.signature import structural_signature
from neuron_core.protocols import Compiler, TargetDevice

__all__ = ["CANONICAL_NUM_BLOCKS", "BuildStats", "GraphBuilder", "PendingProgram", "Progress", "Specs"]

CANONICAL_NUM_BLOCKS = 1009
"""Stand-in for the number of KV blocks in capture: a prime, so that a shape derived from it is recognised."""

GRAPH_TEXT = "graph.txt"
"""File of an entry with the canonical graph, to show what differs between two keys."""

Progress = Callable[[int, int, str, float], None]
"""``on_progress(done, total, what, seconds)`` after each distinct graph of a program is ready."""

Specs = Mapping[str, TensorSpec | tuple[tuple[int, ...], torch.dtype]]
"""Every input of a program by name; shape and dtype alone mean row-major."""

logger = logging.getLogger(__name__)


@dataclass
class BuildStats:
    """Counts of distinct graphs: captured, compiled here, loaded ready-made; and parts that shared one.

    ``seconds`` is work done per bucket (capture, compile and load), which overlaps when several jobs run.
    """

    captured: int = 0
    compiled: int = 0
    loaded: int = 0
    shared: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def spend(self, bucket: str, seconds: float) -> None:
        """Add work to a bucket."""
        self.seconds[bucket] = self.seconds.get(bucket, 0.0) + seconds


@dataclass(frozen=True, eq=False)
class _Job:
    """A graph on its way; its output specs are known before it is compiled."""

    part: Part
    bucket: str
    specs: tuple[TensorSpec, ...]
    record: GraphRecord
    future: Future[CompiledGraph]


class PendingProgram:
    """A program whose graphs are being compiled; ``result()`` waits for them."""

    def __init__(
        self, program: Program, jobs: Sequence[_Job], finish: Callable[[_Job], CompiledGraph]
    ) -> None:
        self._program = program
        self._jobs = tuple(jobs)
        self._finish = finish

    def result(self, on_progress: Progress | None = None) -> CompiledProgram:
        """The compiled program; raises the first ``CompileError`` or ``CacheError`` of its graphs."""
        distinct = list(dict.fromkeys(self._jobs))
        ready: dict[_Job, CompiledGraph] = {}
        for done, job in enumerate(distinct, start=1):
            ready[job] = self._finish(job)
            if on_progress is not None:
                what = " ".join(filter(None, (job.bucket, job.part.name)))
                on_progress(done, len(distinct), what, ready[job].seconds)
        return CompiledProgram(self._program, [ready[job] for job in self._jobs])


class GraphBuilder:
    """Turns programs into compiled programs for one device, with one compiler and one cache.

    Equal parts are built once over all programs of a builder. ``jobs`` is the number of compiles that run at
    once (default: one per CPU this process may use). Under ``require_compiled`` a graph that the cache lacks
    is a ``NotCompiledError`` naming it; under ``retry_failed`` a graph whose compile failed before is tried
    again. Without ``load`` artifacts are made and not loaded: programs can be compiled on a host that cannot run
    them, and not called. Not thread-safe.
    """

    def __init__(
        self,
        device: TargetDevice,
        compiler: Compiler,
        cache: CompileCache,
        *,
        passes: PassManager | None = None,
        jobs: int | None = None,
        require_compiled: bool = False,
        retry_failed: bool = False,
        load: bool = True,
    ) -> None:
        self.device = device
        self.compiler = compiler
        self.cache = cache
        self.require_compiled = require_compiled
        self.retry_failed = retry_failed
        self.load = load
        self.passes = passes if passes is not None else default_passes(device.torch_device)
        self.stats = BuildStats()
        self._pool = ThreadPoolExecutor(jobs or len(ALLOWED_CPUS), "neuron-compile", initializer=_unpin)
        self._signatures: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()
        self._parts: dict[Hashable, _Job] = {}
        self._graphs: dict[str, _Job] = {}
        self._counted: set[_Job] = set()
        self._known: tuple[CacheEntry, ...] | None = None

    def build(
        self, program: Program, specs: Specs, *, bucket: str = "", on_progress: Progress | None = None
    ) -> CompiledProgram:
        """Build one program and wait for it; ``bucket`` names it in errors, progress and statistics.

        Raises ``CompileError`` when a part cannot be captured or compiled, or when ``specs`` lacks an input.
        """
        return self.submit(program, specs, bucket=bucket).result(on_progress)

    def submit(self, program: Program, specs: Specs, *, bucket: str = "") -> PendingProgram:
        """Start building: capture happens here, compiles in the background. Submit all buckets, then wait."""
        values = _input_specs(program, specs, bucket)
        jobs: list[_Job] = []
        for part in program.parts:
            job = self._job(part, tuple(values[name] for name in part.inputs), bucket)
            values.update(zip(part.outputs, job.record.output_specs, strict=True))
            jobs.append(job)
        return PendingProgram(program, jobs, self._finish)

    def capture_program(self, program: Program, specs: Specs, bucket: str = "") -> list[CapturedGraph]:
        """The pure graphs of a program's distinct parts, in order, without asking the cache or compiling."""
        values = _input_specs(program, specs, bucket)
        graphs: dict[Hashable, CapturedGraph] = {}
        for part in program.parts:
            inputs = tuple(values[name] for name in part.inputs)
            key = (*self._identity(part), inputs)
            if key not in graphs:
                graphs[key] = self.capture(part, inputs, bucket)
            values.update(zip(part.outputs, graphs[key].output_specs(), strict=True))
        return list(graphs.values())

    def capture(self, part: Part, specs: tuple[TensorSpec, ...], bucket: str = "") -> CapturedGraph:
        """The pure graph of a part: captured, and through all passes. The cache is not asked."""
        self.stats.captured += 1
        shared = SharedInputs({**repeated_inputs(part).same_as, **dict(part.same_as)}, part.overlaps)
        return self.passes.run(capture(part, specs, self.device.torch_device, bucket, shared=shared))

    def close(self) -> None:
        """Wait for running compiles and end the compile threads."""
        self._pool.shutdown()

    def _job(self, part: Part, specs: tuple[TensorSpec, ...], bucket: str) -> _Job:
        key = (*self._identity(part), specs)
        signature = self._signatures[part.module]
        if key in self._parts:
            self.stats.shared += 1
        else:
            start = time.perf_counter()
            self._parts[key] = self._recorded(part, signature, specs, bucket) or self._captured(
                part, signature, specs, bucket
            )
            self.stats.spend(bucket, time.perf_counter() - start)
        return self._parts[key]

    def _identity(self, part: Part) -> tuple[Hashable, ...]:
        """What is equal for parts that share a graph when their inputs have equal specs."""
        if part.module not in self._signatures:
            self._signatures[part.module] = structural_signature(part.module)
        signature = self._signatures[part.module]
        structure = signature if signature is not None else id(part.module)
        return (structure, part.static, len(part.outputs), part.shared)

    def _recorded(
        self, part: Part, signature: str | None, specs: tuple[TensorSpec, ...], bucket: str
    ) -> _Job | None:
        """A job known from its request key, without capture; None when it must be captured."""
        if signature is None:
            return None
        for candidate in dict.fromkeys((self._shape_free(part, specs), specs)):
            record = self._record(part, signature, candidate)
            if record is None or not record.is_current():
                return None
            if record.shape_free or candidate == specs:
                entry = self.cache.find(record.key.digest)
                return None if entry is None else self._start(part, bucket, candidate, record, entry)
        return None

    def _record(self, part: Part, signature: str, specs: tuple[TensorSpec, ...]) -> GraphRecord | None:
        digest = request_key(part, signature, specs, self.compiler, self.passes.names)
        stored = self.cache.get_request(digest)
        try:
            return None if stored is None else GraphRecord.from_json(stored)
        except (KeyError, TypeError, AttributeError, ValueError):
            return None  # written by another version; capture replaces it

    def _captured(
        self, part: Part, signature: str | None, specs: tuple[TensorSpec, ...], bucket: str
    ) -> _Job:
        free = self._shape_free(part, specs)
        used, graph = free, self.capture(part, free, bucket)
        key = graph_key(graph, self.compiler, self.passes.names)
        record = GraphRecord.of(graph, key, shape_free=free == specs or _only_opaque_uses(graph))
        self._remember(part, signature, free, record)
        if not record.shape_free:
            used, graph = specs, self.capture(part, specs, bucket)
            record = GraphRecord.of(graph, graph_key(graph, self.compiler, self.passes.names))
            self._remember(part, signature, specs, record)
        if self._known is None:
            self._known = tuple(self.cache.entries())  # once: what this start compiles explains nothing
        return self._start(part, bucket, used, record, graph)

    def _remember(
        self, part: Part, signature: str | None, specs: tuple[TensorSpec, ...], record: GraphRecord
    ) -> None:
        if signature is not None:
            digest = request_key(part, signature, specs, self.compiler, self.passes.names)
            self.cache.put_request(digest, record.to_json())

    def _start(
        self,
        part: Part,
        bucket: str,
        specs: tuple[TensorSpec, ...],
        record: GraphRecord,
        source: CapturedGraph | CacheEntry,
    ) -> _Job:
        digest = record.key.digest
        if digest not in self._graphs:
            future = self._pool.submit(self._make, part.name, record, source)
            self._graphs[digest] = _Job(part, bucket, specs, record, future)
        return self._graphs[digest]

    def _make(self, name: str, record: GraphRecord, source: CapturedGraph | CacheEntry) -> CompiledGraph:
        """In a compile thread: compile, unless the cache has the entry by now, and load it."""
        start = time.perf_counter()
        if isinstance(source, CapturedGraph):
            entry, compiled = self.cache.get_or_compile(
                record.key, self._compile(source), facts=self._facts(source), retry_failed=self.retry_failed
            )
            if compiled:
                logger.info("%s", explain_miss(record.key, source.name, source.bucket, self._known or ()))
        else:
            entry, compiled = source, False
            self.cache.count_hit(entry)
        call = self.compiler.load(entry.path, record.groups) if self.load else _not_loaded
        seconds = time.perf_counter() - start
        return CompiledGraph(name, call, record.key, record.output_specs, entry.path, compiled, seconds)

    def _compile(self, graph: CapturedGraph) -> Callable[[Any], Mapping[str, Any]]:
        def compile_into(staging: Any) -> Mapping[str, Any]:
            if self.require_compiled:
                raise NotCompiledError(
                    f"{graph.label} is not in the compile cache {self.cache.root} and may not be compiled here "
                    "(VLLM_NEURON_REQUIRE_COMPILED): compile it ahead of time, or allow compiling"
                )
            self.compiler.compile(graph, staging)
            (staging / GRAPH_TEXT).write_text(canonical_text(graph))
            return {
                "key_facts": key_facts(graph, self.compiler, self.passes.names),
                **self.compiler.describe(),
                "pass_seconds": {name: round(seconds, 6) for name, seconds in graph.pass_seconds.items()},
            }

        return compile_into

    def _facts(self, graph: CapturedGraph) -> dict[str, Any]:
        """What is known before compiling, for the manifest or for the record of a failure."""
        return {
            "part": graph.name,
            "bucket": graph.bucket,
            "compiler": self.compiler.name,
            "version": self.compiler.version(),
            "flags": {name: str(value) for name, value in self.compiler.flags().items()},
        }

    def _finish(self, job: _Job) -> CompiledGraph:
        try:
            graph = job.future.result()
        except CacheError as error:
            graph = self._rebuild(job, error)
        if job not in self._counted:
            self._counted.add(job)
            self.stats.compiled += graph.compiled
            self.stats.loaded += not graph.compiled
            self.stats.spend(job.bucket, graph.seconds)
        return graph

    def _rebuild(self, job: _Job, cause: CacheError) -> CompiledGraph:
        """An entry that verified but does not load here is compiled again, once."""
        logger.warning("%s: %s; it is compiled again", job.part.name, cause)
        self.cache.invalidate(job.record.key.digest)
        graph = self.capture(job.part, job.specs, job.bucket)
        return self._make(job.part.name, job.record, graph)

    def _shape_free(self, part: Part, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """``specs`` without the number of KV blocks, for a compiler whose artifacts do not depend on it."""
        if not self.compiler.shape_free_inputs:
            return specs
        return tuple(
            spec.with_first_dim(CANONICAL_NUM_BLOCKS) if name.startswith(KV_PREFIX) else spec
            for name, spec in zip(part.inputs, specs, strict=True)
        )


def _input_specs(program: Program, specs: Specs, bucket: str) -> dict[str, TensorSpec]:
    values: dict[str, TensorSpec] = {}
    for name in program.inputs():
        if name not in specs:
            raise CompileError(f"bucket {bucket}: no spec for program input {name!r}")
        spec = specs[name]
        values[name] = spec if isinstance(spec, TensorSpec) else TensorSpec.contiguous(*spec)
    return values


def _not_loaded(_: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    raise CompileError("this program was compiled without being loaded; build it with load=True to run it")


def _only_opaque_uses(graph: CapturedGraph) -> bool:
    """Whether KV tensors reach nothing but custom operators, whose code reads their size at run time."""
    own_outputs = set(graph.output_nodes()[: graph.num_outputs])
    for node in graph.module.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.numel() % CANONICAL_NUM_BLOCKS:
            continue
        if node in own_outputs or any(
            user.op != "output" and getattr(user.target, "namespace", "aten") in ("aten", "prims")
            for user in node.users
        ):
            return False
    return True


def _unpin() -> None:
    """A compile thread and its g++ use every CPU, even when the main thread is pinned to one."""
    os.sched_setaffinity(0, ALLOWED_CPUS)
