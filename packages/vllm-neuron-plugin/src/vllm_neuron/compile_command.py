# SPDX-License-Identifier: Apache-2.0
"""``neuron compile``: the graphs of a server, compiled before it starts, on a host that need not have its device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neuron_core.devices.chips import chip_for_target
from neuron_core.devices.host import ALLOWED_CPUS
from neuron_core.environ import Environment, export
from neuron_core.errors import ConfigError
from vllm_neuron.cli.arguments import engine_config

if TYPE_CHECKING:
    from rich.table import Table
    from vllm.config import VllmConfig

    from neuron_core.graphs.aot import AotResult
    from vllm_neuron.ahead import AheadReport

__all__ = ["compile_command", "compile_from_environment", "report_table"]

EPILOG = """\b
Examples:
  neuron compile Qwen/Qwen3-0.6B --target cpu --output graphs
  neuron compile meta-llama/Llama-3.1-70B --target trn2 --tensor-parallel-size 8 --output graphs
  VLLM_NEURON_CACHE_DIR=graphs VLLM_NEURON_REQUIRE_COMPILED=1 vllm serve Qwen/Qwen3-0.6B
"""


@click.command(
    "compile",
    short_help="Compile a server's graphs ahead of time.",
    epilog=EPILOG,
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": ["-h", "--help"],
    },
)
@click.argument("model")
@click.option("--target", required=True, help="What the graphs will run on: cpu, trn2 or trn3.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Compile cache to fill (default: VLLM_NEURON_CACHE_DIR). A server with this cache compiles nothing.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that compile (default: one per CPU).")
@click.option(
    "--cpu-threads", type=click.IntRange(min=1), help="Threads a rank has on the host that will serve."
)
@click.option(
    "--lnc", type=click.IntRange(1, 2), help="Physical cores per logical core (default: the chip's)."
)
@click.option("--retry-failed", is_flag=True, help="Try again what failed to compile before.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.pass_context
def compile_command(
    context: click.Context,
    model: str,
    target: str,
    output: Path | None,
    jobs: int | None,
    cpu_threads: int | None,
    lnc: int | None,
    retry_failed: bool,
    as_json: bool,
) -> None:
    """Compile every graph that `vllm serve MODEL` with the same options would compile at its start.

    All other options are those of `vllm serve`, such as --tensor-parallel-size, --max-model-len, --max-num-seqs
    and --additional-config. Weights are not read: a folder with the model's config.json is enough.
    """
    if target != "cpu":
        chip_for_target(target)
        if cpu_threads is not None:
            raise ConfigError("--cpu-threads", cpu_threads, f"says nothing about {target}; leave it out")
    elif lnc is not None:
        raise ConfigError("--lnc", lnc, "says nothing about the CPU; leave it out")
    # The engine is configured as on the CPU device whatever this host has: only its shapes matter.
    export({"VLLM_NEURON_DEVICE": "cpu", "VLLM_NEURON_CPU_COMPILE": "0"})
    # vLLM's log goes to stdout, which is the report's.
    export({"VLLM_LOGGING_STREAM": "ext://sys.stderr"})
    environment = Environment.read()
    directory = (output or environment.cache_dir).expanduser().absolute()
    vllm_config = engine_config(model, context.args)
    report = _compile(
        vllm_config,
        target,
        directory,
        jobs=jobs or environment.compile_jobs,
        cpu_threads=cpu_threads,
        lnc=lnc or environment.logical_nc_config,
        retry_failed=retry_failed or environment.retry_failed,
        quiet=as_json,
    )
    if as_json:
        click.echo(json.dumps(report_json(report), indent=1))
    else:
        print_report(report)
    context.exit(0 if report.is_complete else 1)


def compile_from_environment(vllm_config: VllmConfig) -> int:
    """What ``VLLM_NEURON_CPU_COMPILE=1`` makes of a server's start; returns an exit code."""
    environment = Environment.read()
    target = environment.platform_target or "cpu"
    report = _compile(
        vllm_config,
        target,
        environment.cache_dir,
        jobs=environment.compile_jobs,
        cpu_threads=None,
        lnc=environment.logical_nc_config,
        retry_failed=environment.retry_failed,
        quiet=False,
    )
    print_report(report)
    return 0 if report.is_complete else 1


def _compile(
    vllm_config: VllmConfig,
    target: str,
    directory: Path,
    *,
    jobs: int | None,
    cpu_threads: int | None,
    lnc: int | None,
    retry_failed: bool,
    quiet: bool,
) -> AheadReport:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vllm_neuron.ahead import compile_engine, model_compile

    processes = jobs or len(ALLOWED_CPUS)
    job = model_compile(
        vllm_config,
        target,
        directory,
        cpu_threads=cpu_threads,
        lnc=lnc,
        jobs=processes,
        retry_failed=retry_failed,
    )
    columns = (TextColumn("Compiling for {task.fields[target]}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        disable=quiet,
    ) as progress:
        bar = progress.add_task("", total=len(job.tasks()), target=target)

        def on_result(result: AotResult) -> None:
            progress.update(bar, advance=1, description=f"{result.task.bucket} {status(result)}")

        return compile_engine(vllm_config, job, jobs=processes, on_result=on_result)


def status(result: AotResult) -> str:
    """``compiled``, ``in cache``, ``captured`` or ``failed``."""
    if result.outcome is None:
        return "failed"
    if result.outcome.advice:
        return "captured"
    return "compiled" if result.outcome.compiled else "in cache"


def print_report(report: AheadReport) -> None:
    """The table, what failed and why, and what to do next."""
    from rich.console import Console

    # A pipe has no width of its own, and eighty columns would cut the bucket names.
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(report_table(report))
    for result in report.failed:
        task = result.task
        console.print(
            f"rank {task.rank}, bucket {task.bucket} failed: {result.error}", markup=False, soft_wrap=True
        )
        console.print(f"  log: {result.log}", markup=False, soft_wrap=True)
    if report.advice:
        console.print(report.advice, markup=False, soft_wrap=True)
        console.print(f"captured graphs: {report.cache_dir / 'captured'}", markup=False, soft_wrap=True)
    if report.is_complete:
        console.print(
            f"graphs are in {report.cache_dir}; serve with VLLM_NEURON_CACHE_DIR={report.cache_dir} "
            "VLLM_NEURON_REQUIRE_COMPILED=1",
            markup=False,
            soft_wrap=True,
        )


def report_table(report: AheadReport) -> Table:
    """One row per bucket."""
    from rich.table import Table

    ranks = "0" if report.tensor_parallel_size == 1 else f"0-{report.tensor_parallel_size - 1}"
    table = Table(title=f"{report.target}: {len(report.results)} buckets in {report.seconds:.1f} s")
    for name in ("bucket", "ranks", "status"):
        table.add_column(name)
    for name in ("captured", "compiled", "in cache", "seconds", "peak MiB"):
        table.add_column(name, justify="right")
    for result in report.results:
        outcome = result.outcome
        counts = ("", "", "") if outcome is None else (outcome.captured, outcome.compiled, outcome.loaded)
        figures = (*counts, f"{result.seconds:.1f}", result.peak_bytes >> 20)
        table.add_row(result.task.bucket, ranks, status(result), *(str(figure) for figure in figures))
    return table


def report_json(report: AheadReport) -> dict[str, Any]:
    """The report as ``--json`` prints it."""
    return {
        "target": report.target,
        "cache_dir": str(report.cache_dir),
        "tensor_parallel_size": report.tensor_parallel_size,
        "seconds": round(report.seconds, 3),
        "complete": report.is_complete,
        "advice": report.advice,
        "buckets": [
            {
                "bucket": result.task.bucket,
                "rank": result.task.rank,
                "status": status(result),
                "captured": result.outcome.captured if result.outcome else 0,
                "compiled": result.outcome.compiled if result.outcome else 0,
                "in_cache": result.outcome.loaded if result.outcome else 0,
                "seconds": round(result.seconds, 3),
                "peak_bytes": result.peak_bytes,
                "error": result.error,
                "log": str(result.log) if result.log else None,
            }
            for result in report.results
        ],
    }
