# SPDX-License-Identifier: Apache-2.0
"""The scales of FP8 caches: under which names they are stored, and loading them strictly."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from neuron_core.errors import CheckpointError, ConfigError
from neuron_models.attention import PagedAttention
from neuron_models.checkpoint import Checkpoint
from neuron_parallel import ParallelGroup

logger = logging.getLogger(__name__)

SCALES_FILE = "kv_scales.safetensors"
"""The scales file of a model folder."""

_ENDINGS = {
    kind: (
        f"{kind}_scale",
        f"attn.{kind}_scale",
        f"{kind}_proj.{kind}_scale",
        f"{kind}_proj.output_scale",
        "kv_scale",
    )
    for kind in ("k", "v")
}
"""Names of a layer's scale below its ``self_attn``: ours, vLLM's, ModelOpt's, AutoFP8's, and AutoFP8's for both."""

SCALE_NAMES = tuple(dict.fromkeys(f"self_attn.{name}" for names in _ENDINGS.values() for name in names))
"""Endings of the checkpoint names of scales."""


@dataclass(frozen=True)
class KVScaleStats:
    """How many scales came from ``source`` (a file, or None) and how many stayed 1.0."""

    source: Path | None
    num_loaded: int
    num_default: int


@dataclass(frozen=True, eq=False)
class _Stored:
    """Scales by name as stored, and what E4M3 maximum they were made for, if that is known."""

    source: Path
    tensors: Mapping[str, Tensor]
    fp8_max: float | None


@torch.no_grad()
def load_kv_scales(
    model: nn.Module,
    folder: str | os.PathLike[str],
    group: ParallelGroup,
    rank: int,
    file: str | os.PathLike[str] | None = None,
) -> KVScaleStats:
    """Fill the scales of ``model``'s FP8 caches for ``rank`` of ``group``.

    They come from ``file``, else from ``kv_scales.safetensors`` in ``folder``, else from the checkpoint's own
    tensors, else they are 1.0, which a warning says. A scale is one number, or one per KV head of the model. A file
    made for another E4M3 maximum is rescaled to the model's. A model without FP8 caches is left alone.

    Raises `CheckpointError` naming the tensors if a file lacks one or holds others, if a scale is stored under two
    names, has another shape, or is not finite and positive; nothing is filled then. Raises `ConfigError` if ``file``
    is given and the cache is not FP8.
    """
    layers = scaled_layers(model)
    if not layers:
        if file is not None:
            raise ConfigError(
                "kv_scales", str(file), "only an FP8 cache has scales; use --kv-cache-dtype fp8"
            )
        return KVScaleStats(None, 0, 0)
    place = Path(file) if file is not None else Path(folder) / SCALES_FILE
    is_file = file is not None or place.is_file()
    stored = _read_file(place) if is_file else _read_checkpoint(Path(folder))
    found, problems = _match(layers, stored)
    missing = [f"{layer}.{kind}_scale" for layer in layers for kind in "kv" if (layer, kind) not in found]
    if is_file and missing:
        problems.append(f"{len(missing)} missing: {', '.join(missing[:20])}")
    if problems:
        raise CheckpointError(f"{stored.source}: KV scales {'; '.join(problems)}")
    for (layer, kind), scale in found.items():
        _fill(layers[layer], kind, scale, stored.fp8_max, group, rank)
    stats = KVScaleStats(stored.source if found else None, len(found), len(missing))
    _report(stats)
    return stats


def scaled_layers(model: nn.Module) -> dict[str, PagedAttention]:
    """The attentions of ``model`` that have an FP8 cache, by the name of the module around each, in layer order."""
    return {
        name.rpartition(".")[0]: module
        for name, module in model.named_modules()
        if isinstance(module, PagedAttention) and module.is_scaled
    }


def _read_file(file: Path) -> _Stored:
    with _open(file) as handle:
        made_for = (handle.metadata() or {}).get("fp8_max")
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    return _Stored(file, tensors, float(made_for) if made_for is not None else None)


def _read_checkpoint(folder: Path) -> _Stored:
    tensors = {}
    for name, info in Checkpoint(folder).tensors.items():
        if name.endswith(SCALE_NAMES):
            with _open(info.file) as handle:
                tensors[name] = handle.get_tensor(name)
    return _Stored(folder, tensors, None)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a complete safetensors file ({error})") from error


def _match(
    layers: Mapping[str, PagedAttention], stored: _Stored
) -> tuple[dict[tuple[str, str], Tensor], list[str]]:
    """The scale of each layer and kind that is stored, and what is wrong."""
    found: dict[tuple[str, str], Tensor] = {}
    problems: list[str] = []
    claimed: set[str] = set()
    for layer, attention in layers.items():
        for kind, endings in _ENDINGS.items():
            names = [name for ending in endings if (name := f"{layer}.{ending}") in stored.tensors]
            claimed.update(names)
            if len(names) > 1:
                problems.append(f"given twice: {', '.join(names)}")
            elif names and (problem := _problem(stored.tensors[names[0]], attention.num_kv_heads)):
                problems.append(f"{names[0]} {problem}")
            elif names:
                found[layer, kind] = stored.tensors[names[0]].float().flatten()
    if unexpected := sorted(stored.tensors.keys() - claimed):
        problems.append(f"{len(unexpected)} unexpected: {', '.join(unexpected[:20])}")
    return found, problems


def _problem(scale: Tensor, num_kv_heads: int) -> str | None:
    if scale.numel() not in (1, num_kv_heads) or max(scale.shape, default=1) != scale.numel():
        return f"has shape {list(scale.shape)} instead of [1] or [{num_kv_heads}]"
    if not scale.is_floating_point():
        return f"has dtype {scale.dtype}, which is no floating point"
    wide = scale.float()
    return None if bool((wide.isfinite() & (wide > 0)).all()) else "is not finite and positive"


def _fill(
    attention: PagedAttention,
    kind: str,
    scale: Tensor,
    made_for: float | None,
    group: ParallelGroup,
    rank: int,
) -> None:
    target = attention.k_scale if kind == "k" else attention.v_scale
    assert target is not None
    start, stop = attention.heads(group.size).span(rank, group.size)
    rescale = made_for / attention.fp8_max if made_for is not None else 1.0
    target.copy_(scale.expand(attention.num_kv_heads)[start:stop] * rescale)


def _report(stats: KVScaleStats) -> None:
    if stats.num_loaded:
        logger.info("loaded %d scales of the FP8 KV cache from %s", stats.num_loaded, stats.source)
    if stats.num_default:
        logger.warning(
            "%d scales of the FP8 KV cache are 1.0: neither the checkpoint nor a file %s holds them; "
            "values above the E4M3 maximum are clamped",
            stats.num_default,
            SCALES_FILE,
        )
