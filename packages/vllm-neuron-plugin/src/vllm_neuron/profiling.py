# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``start_profile`` and ``stop_profile``: our timeline and torch's operators, of all ranks, in one file."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._profiler import _ExperimentalConfig
from vllm.config import ProfilerConfig
from vllm.config.profiler import validate_profile_prefix
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm.profiler.wrapper import TorchProfilerWrapper

from neuron_core.devices.base import Device
from neuron_core.environ import export
from neuron_core.errors import ConfigError, NeuronError
from neuron_core.profiling.chrome import RankTrace, merge, rank_trace, write_trace
from neuron_core.profiling.explorer import inspection_variables
from neuron_core.profiling.timeline import Kind, Thread, Timeline, record, recording

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["ProfileError", "RankProfiler", "ScheduleTimes", "rank_profiler"]

logger = init_logger(f"vllm.{__name__}")

T = TypeVar("T")

SETTING = "--profiler-config.torch_profiler_dir"
_CARRIED = "neuron_times"


class ProfileError(NeuronError, RuntimeError):
    """A profile cannot be started or stopped now; the engine goes on."""


class ScheduleTimes:
    """When the scheduler worked, carried to the ranks by the schedules: it may live in another process."""

    def __init__(self) -> None:
        self._times: list[tuple[str, Kind, int, int, Mapping[str, object]]] = []
        self._idle = True

    @classmethod
    def wanted(cls, config: ProfilerConfig) -> ScheduleTimes | None:
        """One if profiles can be taken at all."""
        return None if config.profiler is None else cls()

    def scheduled(self, begun: int, output: SchedulerOutput) -> None:
        """Note that ``output`` was made since ``begun``, and send all that was noted along with it."""
        about = {"tokens": output.total_num_scheduled_tokens, "requests": len(output.num_scheduled_tokens)}
        args = {**about, "after_idle": self._idle}
        self._times.append(("schedule", Kind.SCHEDULE, begun, time.perf_counter_ns(), args))
        setattr(output, _CARRIED, (Thread.current(), self._times))
        self._times = []

    def updated(self, begun: int, *, idle: bool) -> None:
        """Note that a step's output was taken in since ``begun``, and whether it left no request."""
        self._idle = idle
        self._times.append(("update from output", Kind.SCHEDULE, begun, time.perf_counter_ns(), {}))


def _add_carried(timeline: Timeline, output: SchedulerOutput) -> None:
    thread, times = getattr(output, _CARRIED, (None, ()))
    for name, kind, begun, ended, args in times:
        if begun >= timeline.begun:
            timeline.add(name, kind, begun, ended, args, thread)


class RankProfiler(TorchProfilerWrapper):
    """Profiles of one rank. vLLM's class counts delay and limit; the ranks' traces meet in one file of rank 0.

    ``on_stream`` runs work between two steps, so that the ranks, which all do this at the same step, may talk.
    ``records_ops`` is whether torch's profiler runs too.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        rank: int,
        world_size: int,
        on_stream: Callable[[Callable[[], Any]], Any],
        *,
        records_ops: bool,
    ) -> None:
        super().__init__(
            config, f"rank{rank}", rank, activities=("CPU",) if records_ops else (), on_trace_ready=self._keep
        )
        # Neither vLLM's own table nor its printing: ``neuron profile summarize`` reads the trace.
        self.dump_cpu_time_total = False
        # The stream may be a thread of its own, and it computes.
        self._profiler_kwargs["experimental_config"] = _ExperimentalConfig(profile_all_threads=True)
        self._rank = rank
        self._world_size = world_size
        self._on_stream = on_stream
        self._records_ops = records_ops
        self._folder = Path(config.torch_profiler_dir)
        self._prefix = ""
        self._open = False
        self._problem: str | None = None
        self._timeline: Timeline | None = None
        self._ops: Mapping[str, Any] | None = None
        self._part: RankTrace | None = None

    def profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start a profile, after ``delay_iterations`` steps if any, or stop it.

        Raises ``ProfileError`` when one is started twice, stopped without a start or cannot be written, and
        ``ConfigError`` if the folder cannot be. All ranks find the same; only the last raises, because vLLM stops
        reading answers at the first failure and would take one that is left for that of its next call.
        """
        try:
            if is_start:
                self._begin(validate_profile_prefix(prefix), delay_iterations, max_iterations)
            else:
                self._end()
        except NeuronError:
            if self._rank == self._world_size - 1:
                raise

    def _begin(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        if self._open:
            raise ProfileError("a profile is open; call stop_profile before starting another")
        if (problem := self._anywhere(self._folder_problem())) is not None:
            raise ConfigError(SETTING, str(self._folder), problem)
        self._prefix, self._problem = prefix or "", None
        self.start(delay_iterations=delay_iterations, max_iterations=max_iterations)
        if (problem := self._anywhere(self._problem)) is not None:
            self.stop()
            raise ProfileError(f"the profile was not started: {problem}")
        self._open = True

    def _end(self) -> None:
        if not self._open:
            raise ProfileError("no profile is open; call start_profile first")
        unwritten = self._part is not None
        self.stop()
        if unwritten:
            self._problem = None
            self._write()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise ProfileError(problem)  # still open, so that stopping again tries again
        self._open = False

    def step_of(self, schedule: SchedulerOutput) -> None:
        """Count a step, which may begin or end what is recorded, and take in when it was scheduled."""
        self.step()
        timeline = recording()
        if timeline is not None and self._rank == 0:
            _add_carried(timeline, schedule)

    def _start(self) -> None:
        self._on_stream(_nothing)  # what was submitted before is over, and not recorded
        try:
            if self._records_ops:
                super()._start()
        except Exception as error:
            self._problem = str(error)
            raise
        self._timeline, self._ops = Timeline(), None
        record(self._timeline)

    def _stop(self) -> None:
        self._on_stream(_nothing)  # what was submitted is still recorded
        timeline, self._timeline = self._timeline, None
        record(None)
        if timeline is None:
            return
        timeline.close()
        try:
            if self._records_ops:
                super()._stop()
            self._part = rank_trace(timeline, self._rank, self._ops)
        except Exception as error:  # the other ranks wait in _write
            self._problem = f"the profile is lost: {error}"
        self._ops = None
        if timeline.dropped:
            logger.warning("the profile had %d slices too many, which were not kept", timeline.dropped)
        self._write()

    def _keep(self, profile: torch.profiler.profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            self._ops = json.loads(path.read_bytes())

    def _write(self) -> None:
        """Send this rank's part to rank 0, which writes the file; all ranks then know whether it could."""
        parts = [part for part in self._gather(self._part) if part is not None]
        problem = self._problem
        if self._rank == 0 and parts:
            path = self._folder / self._file_name()
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_trace(path, merge(parts, {"prefix": self._prefix, "with_ops": self._records_ops}))
                logger.info("wrote the profile %s; neuron profile summarize reads it", path)
            except OSError as error:
                hint = (
                    f"cannot be written ({error}); the profile is kept: make room and call stop_profile again"
                )
                problem = f"{SETTING}={str(self._folder)!r}: {hint}"
        self._problem = self._anywhere(problem)
        if self._problem is None:
            self._part = None
        else:
            logger.error("%s", self._problem)

    def _file_name(self) -> str:
        now = time.time()
        stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1e3) % 1000:03d}"
        ranks = "rank0" if self._world_size == 1 else f"rank0-{self._world_size - 1}"
        prefix = f"{self._prefix}_" if self._prefix else ""
        suffix = ".gz" if self.profiler_config.torch_profiler_use_gzip else ""
        return f"{prefix}{ranks}_{stamp}.trace.json{suffix}"

    def _folder_problem(self) -> str | None:
        if self._rank != 0:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                return None
        except OSError as error:
            return f"cannot be written ({error}); name a folder that this user may write"

    def _anywhere(self, problem: str | None) -> str | None:
        """The first rank's problem, of all that have one."""
        return next((found for found in self._gather(problem) if found is not None), None)

    def _gather(self, mine: T) -> list[T]:
        if self._world_size == 1:
            return [mine]
        found: list[Any] = [None] * self._world_size
        group = get_world_group().cpu_group
        self._on_stream(lambda: torch.distributed.all_gather_object(found, mine, group=group))
        return found


def rank_profiler(
    config: ProfilerConfig,
    rank: int,
    world_size: int,
    device: Device,
    on_stream: Callable[[Callable[[], Any]], Any],
) -> RankProfiler | None:
    """The profiler of a rank, or None if none is configured; call it before the device starts.

    On a chip the runtime's own traces take the place of torch's, which it excludes.
    """
    if config.profiler is None:
        return None
    if device.chip is not None:
        export(inspection_variables(Path(config.torch_profiler_dir) / f"rank{rank}"))
    return RankProfiler(config, rank, world_size, on_stream, records_ops=device.chip is None)


def _nothing() -> None:
    return None
