# SPDX-License-Identifier: Apache-2.0
"""Strict loading of a checkpoint: each rank reads its slices straight into its parameters."""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuron_core.errors import CheckpointError
from neuron_models.checkpoint import Checkpoint, check_float
from neuron_models.filling import Piece, Progress, fill, pieces_of, readers_for
from neuron_parallel import ParallelGroup, ShardBlock, shard_of

MAX_LISTED = 20


@dataclass(frozen=True)
class LoadStats:
    """What one rank loaded: parameters filled, their size in bytes, and how long it took."""

    num_tensors: int
    size_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Filled bytes per second, in 10^9 bytes."""
        return self.size_bytes / max(self.seconds, 1e-9) / 1e9


@dataclass(frozen=True, eq=False)
class _Target:
    """A block of a parameter and the checkpoint tensor it is read from."""

    source: str
    aliases: tuple[str, ...]
    block: ShardBlock
    region: Tensor
    dim: int

    def full_shape(self) -> tuple[int, ...]:
        shape = list(self.region.shape)
        shape[self.dim] = self.block.size
        return tuple(shape)


@torch.no_grad()
def load_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    group: ParallelGroup,
    rank: int,
    progress: Progress | None = None,
) -> LoadStats:
    """Fill every parameter of ``model`` from the safetensors files of ``folder``, for ``rank`` of ``group``.

    Values are cast to each parameter's dtype on the way. Call it before a device packs weights. Raises
    `CheckpointError` listing the names if a tensor is missing, unexpected, wrongly shaped or not floating
    point, or the file if one is truncated; nothing is filled then. A model's ``derived_tensors`` lists
    endings of names that may be present and are not used. A tied weight may be stored under any of its names,
    or under all if equal. ``progress`` is called with the bytes read and those to read.
    """
    started = time.perf_counter()
    checkpoint = Checkpoint(folder)
    targets = list(_targets(model))
    _check(checkpoint, targets, getattr(model, "derived_tensors", ()))
    fill(list(_pieces(checkpoint, targets, group, rank)), readers_for(group.size), progress)
    for target in targets:
        _check_ties(checkpoint, target, group, rank)
    parameters = list(model.parameters())
    size = sum(parameter.nbytes for parameter in parameters)
    return LoadStats(len(parameters), size, time.perf_counter() - started)


def _targets(model: nn.Module) -> Iterator[_Target]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, own_names in names.items():
        shard = shard_of(parameter)
        start = 0
        for block in shard.blocks:
            sources = [_source_name(name, block.name) for name in own_names]
            region = parameter.data.narrow(shard.dim, start, block.local_size)
            yield _Target(sources[0], tuple(sources[1:]), block, region, shard.dim)
            start += block.local_size


def _source_name(name: str, sibling: str) -> str:
    if not sibling:
        return name
    module, _, leaf = name.rpartition(".")
    return f"{module.rpartition('.')[0]}.{sibling}.{leaf}".removeprefix(".")


def _check(checkpoint: Checkpoint, targets: list[_Target], derived: Iterable[str]) -> None:
    found = checkpoint.tensors
    missing = [t.source for t in targets if not any(name in found for name in (t.source, *t.aliases))]
    expected = {name for t in targets for name in (t.source, *t.aliases)}
    unexpected = [name for name in found if name not in expected and not name.endswith(tuple(derived))]
    problems = []
    for label, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            problems.append(f"{len(names)} {label}: {_listed(names)}")
    if wrong := list(_misfits(checkpoint, targets)):
        problems.append(f"{len(wrong)} that do not fit: {_listed(wrong)}")
    if problems:
        raise CheckpointError(f"{checkpoint.folder}: tensors {'; '.join(problems)}")


def _misfits(checkpoint: Checkpoint, targets: list[_Target]) -> Iterator[str]:
    for target in targets:
        for name in (target.source, *target.aliases):
            info = checkpoint.tensors.get(name)
            if info is None:
                continue
            if info.shape != target.full_shape():
                shapes = f"{list(info.shape)} instead of {list(target.full_shape())}"
                yield f"{name} has shape {shapes} ({info.file.name})"
            elif problem := check_float(name, info):
                yield f"{problem} ({info.file.name})"


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(sorted(names)[:MAX_LISTED]) + more


def _stored_names(checkpoint: Checkpoint, target: _Target) -> list[str]:
    return [name for name in (target.source, *target.aliases) if name in checkpoint.tensors]


def _pieces(
    checkpoint: Checkpoint, targets: Iterable[_Target], group: ParallelGroup, rank: int
) -> Iterator[Piece]:
    for target in targets:
        start, stop = target.block.span(rank, group.size)
        filled = target.region.narrow(target.dim, 0, stop - start)
        target.region.narrow(target.dim, stop - start, target.block.local_size - (stop - start)).zero_()
        stored = checkpoint.tensors[_stored_names(checkpoint, target)[0]]
        yield from pieces_of(stored, target.dim, start, stop, filled)


def _check_ties(checkpoint: Checkpoint, target: _Target, group: ParallelGroup, rank: int) -> None:
    start, stop = target.block.span(rank, group.size)
    stored = _stored_names(checkpoint, target)
    filled = target.region.narrow(target.dim, 0, stop - start)
    for name in stored[1:]:
        for row, piece in checkpoint.read(name, target.dim, start, stop):
            if not torch.equal(filled.narrow(0, row, piece.shape[0]), piece.to(filled.dtype)):
                raise CheckpointError(
                    f"{checkpoint.tensors[name].file}: {name} differs from {stored[0]}, "
                    "but the config ties them"
                )
