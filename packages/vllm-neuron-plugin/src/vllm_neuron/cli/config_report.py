# SPDX-License-Identifier: Apache-2.0
"""The report of ``vllm-neuron config``: one JSON document, and its tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import vllm

from neuron_core.cli.output import cell, console, new_table
from neuron_core.environ import Environment
from neuron_core.errors import CapacityError
from vllm_neuron.cli.resolve import Resolved, plain
from vllm_neuron.cli.weights_free import ready_buckets, start_estimates
from vllm_neuron.config import bucket_plan, neuron_config
from vllm_neuron.platform import discovered

if TYPE_CHECKING:
    from neuron_core.estimate import StartEstimate

__all__ = ["report", "show"]

SHOWN = (
    "model_config.model",
    "model_config.dtype",
    "model_config.max_model_len",
    "model_config.quantization",
    "cache_config.cache_dtype",
    "cache_config.block_size",
    "cache_config.enable_prefix_caching",
    "cache_config.num_gpu_blocks_override",
    "cache_config.gpu_memory_utilization",
    "scheduler_config.max_num_seqs",
    "scheduler_config.max_num_batched_tokens",
    "scheduler_config.enable_chunked_prefill",
    "scheduler_config.async_scheduling",
    "scheduler_config.policy",
    "parallel_config.tensor_parallel_size",
    "parallel_config.distributed_executor_backend",
    "load_config.load_format",
)
"""Settings worth a line on a screen; ``--json`` has them all."""


def report(resolved: Resolved) -> dict[str, Any]:
    """Everything the command knows, ready for JSON; raises ``NeuronError`` for what stops a server here."""
    vllm_config = resolved.vllm_config
    found = discovered()
    # Before the buckets: looking for their graphs makes a group of absent ranks, and estimates would ask it.
    memory = _memory(resolved)
    flags = [
        {
            "flag": flag.name,
            "given": flag.given,
            "effective": flag.effective,
            "place": flag.place or None,
            "reason": flag.reason or None,
        }
        for flag in resolved.flags
    ]
    return {
        "vllm": vllm.__version__,
        "device": {"name": found.device.name, "reason": found.reason},
        "architecture": vllm_config.model_config.architecture,
        "flags": flags,
        "set_by_plugin": [{**asdict(change), "reason": change.reason} for change in resolved.changes],
        "settings": resolved.settings(),
        "neuron_config": plain_settings(neuron_config(vllm_config)),
        "buckets": _buckets(resolved),
        "memory": memory,
        "cache_dir": str(Environment.read().cache_dir),
        "remarks": list(resolved.remarks),
    }


def plain_settings(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass, ready for JSON."""
    return {name: plain(value) for name, value in asdict(settings).items()}


def _buckets(resolved: Resolved) -> list[dict[str, Any]]:
    ready = ready_buckets(resolved.vllm_config)
    return [
        {
            "name": bucket.name,
            "phase": bucket.phase.value,
            "tokens": bucket.num_tokens,
            "rows": bucket.num_seqs,
            "context": bucket.context_len,
            "cost": bucket.cost,
            "in_cache": None if ready is None else ready[bucket.name],
        }
        for bucket in bucket_plan(resolved.vllm_config).all()
    ]


def _memory(resolved: Resolved) -> dict[str, Any]:
    estimates = start_estimates(resolved.vllm_config)
    estimate = estimates.own()
    error = ""
    try:
        estimate.require_fit(estimates.others())
    except CapacityError as caught:
        # The last part is the table, which is shown anyway.
        error = " ".join(str(caught).splitlines()[:2])
    return {**_figures(estimate), "error": error or None, "table": estimate.table()}


def _figures(estimate: StartEstimate) -> dict[str, Any]:
    return {
        "ranks": estimate.tensor_parallel_size,
        "total_bytes": estimate.total_bytes,
        "free_bytes": estimate.free_bytes,
        "weights_bytes": estimate.footprint.weights_bytes,
        "packing_bytes": estimate.footprint.packing_bytes,
        "activation_bytes": estimate.footprint.activation_bytes,
        "reserve_bytes": estimate.reserve_bytes,
        "loading_bytes": estimate.loading_bytes,
        "request_blocks": estimate.request_blocks,
        "request_bytes": estimate.request_bytes,
        "kv_bytes": estimate.budget().kv_bytes if estimate.fits() else None,
    }


def show(data: dict[str, Any]) -> None:
    """Print the report as tables."""
    click.echo(f"{data['architecture']} on {data['device']['reason']}; vLLM {data['vllm']}")
    _show_flags(data)
    _show_settings(data)
    _show_buckets(data)
    click.echo(data["memory"]["table"])


def _show_flags(data: dict[str, Any]) -> None:
    table = new_table("flag", "given", "became", "why", fold=("given", "became", "why"))
    for flag in data["flags"]:
        same = flag["given"] == flag["effective"]
        became = "as given" if same else _text(flag["effective"])
        table.add_row(
            cell(flag["flag"]), cell(_text(flag["given"])), cell(became), cell(flag["reason"] or "")
        )
    for change in data["set_by_plugin"]:
        words = (change["setting"], _text(change["before"]), _text(change["after"]), change["reason"])
        table.add_row(*(cell(word) for word in words))
    console().print(table)


def _show_settings(data: dict[str, Any]) -> None:
    table = new_table("setting", "value", fold=("value",))
    for name in SHOWN:
        table.add_row(cell(name), cell(_text(data["settings"].get(name))))
    for name, value in data["neuron_config"].items():
        table.add_row(cell(f"neuron_config.{name}"), cell(_text(value)))
    console().print(table)


def _show_buckets(data: dict[str, Any]) -> None:
    columns = ("tokens", "rows", "context", "cost")
    table = new_table("bucket", *columns, "compile cache", right=columns)
    states = {True: "there", False: "to be compiled", None: "not known"}
    for bucket in data["buckets"]:
        numbers = (str(bucket[name]) for name in columns)
        table.add_row(cell(bucket["name"]), *numbers, states[bucket["in_cache"]])
    console().print(table)
    ready = sum(bucket["in_cache"] is True for bucket in data["buckets"])
    click.echo(f"{ready} of {len(data['buckets'])} buckets are in {data['cache_dir']}\n")


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value)
