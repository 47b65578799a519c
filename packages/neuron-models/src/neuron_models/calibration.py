# SPDX-License-Identifier: Apache-2.0
"""Calibration of an FP8 cache: keys and values of sample texts, and scales that round them least."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from neuron_core.errors import ConfigError
from neuron_core.graphs.buckets import Bucket, Phase
from neuron_core.kv.layout import KVLayout
from neuron_core.ops import reference
from neuron_core.protocols import StaticModel
from neuron_core.step import StepInput
from neuron_models.attention import FP8_MAX, PagedAttention
from neuron_models.filling import Progress

CANDIDATES = 16
"""Scales tried between the smallest that clamps nothing and twice as much."""


@dataclass(frozen=True, eq=False)
class KVSamples:
    """Keys and values seen: a cache per layer ``[blocks, kv_heads, block_size, 2 * head_dim]``, zeros where unused.

    ``layers`` names the modules that scales belong to.
    """

    layers: tuple[str, ...]
    caches: tuple[Tensor, ...]
    num_tokens: int

    def peaks(self) -> Tensor:
        """Largest magnitudes, keys then values, float32 ``[2, layers, kv_heads]``."""
        return torch.stack([_halves(cache).abs().amax(dim=(0, 3, 4)) for cache in self.caches], dim=1)

    def scales(self, *, per_head: bool = False, fp8_max: float = FP8_MAX) -> dict[str, Tensor]:
        """Scales by checkpoint name, float32 ``[1]``, or ``[kv_heads]`` if ``per_head``.

        Each is the one with the least squared rounding error of ``CANDIDATES`` between peak over ``fp8_max`` and twice
        as much; 1.0 where all is zero.
        """
        scales = {}
        for name, cache in zip(self.layers, self.caches, strict=True):
            for kind, samples in zip("kv", _halves(cache).transpose(0, 1), strict=True):
                scales[f"{name}.{kind}_scale"] = _best_scale(samples, per_head, fp8_max)
        return scales

    def save(self, path: str | os.PathLike[str], *, per_head: bool = False, fp8_max: float = FP8_MAX) -> Path:
        """Write the scales file that `load_kv_scales` reads; it appears whole or not at all."""
        target = Path(path)
        staging = target.with_name(f".{target.name}.{os.getpid()}")
        metadata = {"format": "pt", "fp8_max": str(fp8_max), "calibration_tokens": str(self.num_tokens)}
        try:
            save_file(self.scales(per_head=per_head, fp8_max=fp8_max), staging, metadata)
            staging.replace(target)
        finally:
            staging.unlink(missing_ok=True)
        return target


@torch.no_grad()
def record(
    model: nn.Module,
    sequences: Iterable[Sequence[int]],
    *,
    segment_tokens: int = 256,
    progress: Progress | None = None,
) -> KVSamples:
    """Run ``model``'s prefill programs eagerly over token id ``sequences`` and keep what its caches then hold.

    The model is unsharded, filled, and has a cache of its own dtype, so any family of models works. A sequence runs in
    segments of ``segment_tokens``. ``progress`` is called with the tokens run and those to run. Raises `ConfigError`
    for a model that is sharded or has an FP8 cache, for no tokens at all, and if a key or value is not finite.
    """
    if not isinstance(model, StaticModel):
        raise ConfigError(
            "model", type(model).__name__, "calibration needs a static model, as build_model makes"
        )
    layers = _attention_names(model, model.kv_layouts)
    kept = [list(sequence) for sequence in sequences if len(sequence)]
    if not kept:
        raise ConfigError("sequences", [], "calibration needs at least one token")
    block_size = model.kv_layouts[0].block_size
    widths = [math.ceil(len(sequence) / block_size) for sequence in kept]
    caches = {f"kv.{i}": layout.allocate(sum(widths) + 1) for i, layout in enumerate(model.kv_layouts)}
    first_block, num_done, num_tokens = 1, 0, sum(map(len, kept))  # block 0 is the null block
    for sequence, width in zip(kept, widths, strict=True):
        table = torch.arange(first_block, first_block + width, dtype=torch.int32)
        for count in _prefill(model, caches, sequence, segment_tokens, table):
            num_done += count
            if progress is not None:
                progress(num_done, num_tokens)
        first_block += width
    samples = KVSamples(layers, tuple(caches.values()), num_tokens)
    if not bool(samples.peaks().isfinite().all()):
        raise ConfigError(
            "model", type(model).__name__, "has keys or values that are not finite on these texts"
        )
    return samples


def _attention_names(model: nn.Module, layouts: Sequence[KVLayout]) -> tuple[str, ...]:
    attentions = {n: m for n, m in model.named_modules() if isinstance(m, PagedAttention)}
    if len(attentions) != len(layouts):
        raise ConfigError("model", type(model).__name__, "calibration needs one PagedAttention per layer")
    for attention, layout in zip(attentions.values(), layouts, strict=True):
        if attention.is_scaled:
            raise ConfigError("kv_dtype", layout.dtype, "calibrate with a cache of the model's own dtype")
        if attention.num_kv_heads != layout.num_kv_heads:
            raise ConfigError(
                "tensor_parallel_size", "above 1", "calibrate on one rank; scales load on any number"
            )
    return tuple(name.rpartition(".")[0] for name in attentions)


def _halves(cache: Tensor) -> Tensor:
    """Keys and values apart, float32 ``[blocks, 2, kv_heads, block_size, head_dim]``."""
    return torch.stack(cache.float().chunk(2, dim=-1), dim=1)


def _best_scale(samples: Tensor, per_head: bool, fp8_max: float) -> Tensor:
    """``samples [blocks, kv_heads, block_size, head_dim]`` -> ``[kv_heads]`` if ``per_head`` and otherwise ``[1]``."""
    heads = samples.transpose(0, 1).flatten(1) if per_head else samples.reshape(1, -1)
    smallest = heads.abs().amax(dim=1) / fp8_max
    smallest = torch.where(smallest > 0, smallest, 1.0)
    candidates = [smallest * 2 ** (step / CANDIDATES) for step in range(CANDIDATES)]
    errors = torch.stack([_squared_error(heads, scale, fp8_max) for scale in candidates])
    return torch.stack(candidates).gather(0, errors.argmin(0, keepdim=True))[0]


def _squared_error(heads: Tensor, scale: Tensor, fp8_max: float) -> Tensor:
    stored = reference.quantized(heads.unsqueeze(0), scale, fp8_max)[0]
    return (stored.float() * scale.unsqueeze(1) - heads).square().sum(dim=1)


def _prefill(
    model: StaticModel, caches: dict[str, Tensor], sequence: list[int], segment_tokens: int, table: Tensor
) -> Iterator[int]:
    """Yields the tokens of each segment after it ran."""
    block_size = model.kv_layouts[0].block_size
    bucket = Bucket(Phase.PREFILL, segment_tokens, 1, len(table) * block_size)
    program = model.program(bucket, "greedy")
    for begin in range(0, len(sequence), segment_tokens):
        segment = sequence[begin : begin + segment_tokens]
        step = StepInput.padding(bucket, block_size, 0)
        positions = torch.arange(begin, begin + len(segment), dtype=torch.int32)
        step.token_ids[: len(segment)] = torch.tensor(segment, dtype=torch.int32)
        step.positions[: len(segment)] = positions
        step.slots[: len(segment)] = positions + table[0] * block_size
        step.request_rows[: len(segment)] = 0
        step.block_tables[0] = table
        step.sample_rows[0] = len(segment) - 1
        program.run_eager(step.as_values() | caches)
        yield len(segment)
