# SPDX-License-Identifier: Apache-2.0
"""``neuron calibrate``: the scales of a model's FP8 cache, measured on sample texts and written beside its weights."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neuron_core.cli.output import json_option, print_json, progress_bar
from neuron_core.errors import CapacityError, CompileError, ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from neuron_core.protocols import StaticModel
    from neuron_models.calibration import KVSamples

__all__ = ["calibrate_command"]

BLOCK_SIZE = 32
DEFAULT_TOKENS = 4096
DEFAULT_WINDOW = 1024


@click.command("calibrate", short_help="Measure the scales of a model's FP8 KV cache.")
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    required=True,
    help="A UTF-8 file of text like what will be served; may be given several times.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=DEFAULT_TOKENS,
    show_default=True,
    help="How many tokens to take from the beginning of each file, at most.",
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    help=f"Tokens of context; longer texts are cut.  [default: {DEFAULT_WINDOW}, or the model's length if shorter]",
)
@click.option("--per-head", is_flag=True, help="A scale for each KV head instead of one for each layer.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    help="What to compute in.  [default: float32 for a float32 checkpoint, otherwise bfloat16]",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.  [default: kv_scales.safetensors in MODEL, which a server reads by itself]",
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@json_option
def calibrate_command(
    model: Path,
    texts: tuple[Path, ...],
    tokens: int,
    window: int | None,
    per_head: bool,
    dtype: str | None,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Run MODEL over sample texts and write the scales that round its keys and values least.

    MODEL is a folder with config.json, safetensors files and a tokenizer. Texts are read as they stand: a chat
    model's samples hold the marks of its chat template. The file loads on any number of ranks and on every chip.

    \b
    Examples:
      neuron calibrate ./model --texts prompts.txt
      neuron calibrate ./model --texts code.txt --texts chat.txt --per-head --output scales.safetensors
    """
    from neuron_models.kv_scales import SCALES_FILE

    default = model / SCALES_FILE
    file = output or default
    _check_output(file, overwrite)
    config = _read_config(model)
    width = _window(window, config)
    tokenizer = _read_tokenizer(model)
    sequences = {text: _token_ids(model, config, tokenizer, text)[:tokens] for text in texts}
    windows = [ids[i : i + width] for ids in sequences.values() for i in range(0, len(ids), width)]
    started = time.perf_counter()
    samples = _samples(model, config, windows, dtype, hidden=as_json)
    _save(samples, file, per_head)
    facts = {
        "model": str(model),
        "file": str(file),
        "per_head": per_head,
        "tokens": samples.num_tokens,
        "texts": {str(text): len(ids) for text, ids in sequences.items()},
        "seconds": round(time.perf_counter() - started, 3),
        "serve": _serve(model, file, is_default=file.absolute() == default.absolute()),
        "scales": _written(file),
    }
    (print_json if as_json else _report)(facts)


def _check_output(file: Path, overwrite: bool) -> None:
    if file.exists() and not overwrite:
        raise ConfigError(
            "--output", str(file), "exists already; give --overwrite, or another file as --output"
        )
    if not file.absolute().parent.is_dir():
        raise ConfigError("--output", str(file), "is in a folder that does not exist; make it first")
    if not os.access(file.absolute().parent, os.W_OK):
        raise ConfigError("--output", str(file), "is in a folder that cannot be written; name another file")


def _read_config(model: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    from neuron_models.registry import check_model
    from neuron_parallel import ParallelPlan

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "MODEL", str(model), f"has no config.json that can be read ({_one_line(error)})"
        ) from error
    check_model(config, ParallelPlan(1))
    return config


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _window(window: int | None, config: PretrainedConfig) -> int:
    longest: int = config.max_position_embeddings
    if window is not None and window > longest:
        raise ConfigError("--window", window, f"is more than the model's length; {longest} works")
    return window or min(DEFAULT_WINDOW, longest)


def _read_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "MODEL", str(model), f"has no tokenizer that can be read ({_one_line(error)})"
        ) from error


def _token_ids(model: Path, config: PretrainedConfig, tokenizer: Any, text: Path) -> list[int]:
    try:
        ids: list[int] = tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--texts", str(text), f"is not a file of UTF-8 text ({error})") from error
    if not ids:
        raise ConfigError("--texts", str(text), "holds no text; a few thousand tokens work well")
    if max(ids) >= config.vocab_size:
        hint = (
            f"has a tokenizer of another model: token {max(ids)} of {text} is outside its {config.vocab_size}"
        )
        raise ConfigError("MODEL", str(model), hint)
    return ids


def _samples(
    folder: Path,
    config: PretrainedConfig,
    windows: Sequence[Sequence[int]],
    dtype: str | None,
    *,
    hidden: bool,
) -> KVSamples:
    """Load the model whole, as the CPU device serves it, and run it over the windows."""
    import torch

    from neuron_core import ops
    from neuron_core.environ import Environment
    from neuron_models.calibration import record
    from neuron_models.loading import load_weights
    from neuron_parallel import ParallelGroups

    chosen = torch.float32 if config.dtype == torch.float32 else torch.bfloat16
    if dtype is not None:
        chosen = getattr(torch, dtype)
    with torch.device("meta"):
        _check_memory(_build(config, chosen), folder, windows)
    model = _build(config, chosen)
    assert isinstance(model, torch.nn.Module)
    with progress_bar(hidden=hidden, of_bytes=True) as bar:
        task = bar.add_task("weights", total=None)
        group = ParallelGroups.single().tp
        load_weights(
            model, folder, group, 0, lambda done, total: bar.update(task, completed=done, total=total)
        )
    try:
        ops.load_kernels(Environment.read().cache_dir)
    except CompileError as error:
        click.echo(f"Warning: {error}; without kernels this takes far longer", err=True)
    ops.pack_module(model)
    with progress_bar(hidden=hidden) as bar:
        task = bar.add_task("tokens", total=None)
        return record(model, windows, progress=lambda n, total: bar.update(task, completed=n, total=total))


def _build(config: PretrainedConfig, dtype: torch.dtype) -> StaticModel:
    from neuron_models.registry import build_model
    from neuron_parallel import ParallelGroups

    return build_model(config, dtype=dtype, groups=ParallelGroups.single(), block_size=BLOCK_SIZE)


def _check_memory(model: StaticModel, folder: Path, windows: Sequence[Sequence[int]]) -> None:
    """Raise ``CapacityError`` unless weights and cache fit into what this host has free."""
    import torch

    from neuron_core.devices.host import Host
    from neuron_core.kv.slots import blocks_for
    from neuron_core.memory import bytes_per_block, format_bytes, module_bytes

    assert isinstance(model, torch.nn.Module)
    weights = module_bytes([model])
    blocks = 1 + sum(blocks_for(len(window), BLOCK_SIZE) for window in windows)
    cache = blocks * bytes_per_block(model.kv_layouts)
    free = Host().available_memory_bytes()
    if weights + cache > free:
        raise CapacityError(
            f"{folder}: weights of {format_bytes(weights)} and a cache of {format_bytes(cache)} for the texts do "
            f"not fit into the {format_bytes(free)} that are free; calibrate on a larger host, or on fewer --tokens"
        )


def _save(samples: KVSamples, file: Path, per_head: bool) -> None:
    from safetensors import SafetensorError

    try:
        samples.save(file, per_head=per_head)
    except (OSError, SafetensorError) as error:
        hint = f"cannot be written ({_one_line(error)}); name another file"
        raise ConfigError("--output", str(file), hint) from error


def _written(file: Path) -> dict[str, list[float]]:
    """The scales as the file holds them."""
    from safetensors.torch import load_file

    return {name: scale.tolist() for name, scale in sorted(load_file(file).items())}


def _serve(model: Path, file: Path, *, is_default: bool) -> str:
    command = ["vllm", "serve", str(model), "--kv-cache-dtype", "fp8"]
    if not is_default:
        settings = {"neuron_config": {"kv_scales": str(file.absolute())}}
        command += ["--additional-config", json.dumps(settings)]
    return shlex.join(command)


def _report(facts: dict[str, Any]) -> None:
    scales: dict[str, list[float]] = facts["scales"]
    kind = "one for each KV head" if facts["per_head"] else "one for each layer"
    for text, count in facts["texts"].items():
        click.echo(f"{text}: {count} tokens")
    for name, ending in (("key", ".k_scale"), ("value", ".v_scale")):
        found = [number for key, each in scales.items() if key.endswith(ending) for number in each]
        click.echo(f"{name} scales: {len(found)}, {kind}, {min(found):.3g} to {max(found):.3g}")
    click.echo(f"written to {facts['file']} in {facts['seconds']:.1f} s; use them with")
    click.echo(f"  {facts['serve']}")
