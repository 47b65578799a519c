# SPDX-License-Identifier: Apache-2.0
"""The interfaces the packages share; an implementation needs no base class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from neuron_core.graphs.buckets import Bucket
    from neuron_core.graphs.capture import CapturedGraph
    from neuron_core.graphs.program import Program
    from neuron_core.kv.layout import KVLayout

__all__ = ["Compiler", "GraphCall", "GraphPass", "StaticModel", "TargetDevice"]

GraphCall = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""A loaded graph: takes ``[*weights, *inputs]``, a list it may clear, and returns the part's outputs.

Inputs the graph mutates, such as KV tensors, are written in place.
"""


@runtime_checkable
class StaticModel(Protocol):
    """A model that describes itself as one straight-line program per bucket."""

    kv_layouts: tuple[KVLayout, ...]
    """One per layer, in layer order; layer ``i``'s cache is the program value ``kv.{i}``."""
    vocab_size: int
    hidden_size: int
    """Width of the final hidden states that the logits bucket takes."""
    dtype: torch.dtype
    """Of weights and hidden states."""

    def program(self, bucket: Bucket, variant: str) -> Program:
        """The program of one bucket.

        ``variant`` is ``greedy`` (output ``tokens`` only), ``sample`` (``tokens``, ``logits`` float32
        ``[num_seqs, vocab]`` and ``hidden_states`` ``[num_tokens, hidden]``, final-normed) for prefill and
        decode buckets, or ``logits`` for the logits bucket (``hidden_states`` in, ``logits`` out).
        """
        ...


class TargetDevice(Protocol):
    """What a graph builder needs to know of a device."""

    @property
    def name(self) -> str:
        """Kind of device, such as ``cpu`` or ``neuron``."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where the graph's tensors live."""
        ...


class GraphPass(Protocol):
    """One rewriting of a captured graph; see ``graphs.passes.manager``."""

    @property
    def name(self) -> str:
        """Name it is timed and switched off by."""
        ...

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Rewrite ``graph`` in place and return it; raises ``CompileError`` naming node and source line."""
        ...


class Compiler(Protocol):
    """Turns a pure graph with an ``io_map`` into files, and files into a callable."""

    name: str
    shape_free_inputs: bool
    """Whether an artifact works for any size of dimension 0 of a KV tensor."""

    def version(self) -> str:
        """Everything that changes the artifact besides graph and flags; part of the key."""
        ...

    def flags(self) -> Mapping[str, str]:
        """Settings that change the artifact; part of the key."""
        ...

    def target(self) -> str:
        """Identity of the machine the artifact runs on; part of the key."""
        ...

    def compile(self, graph: CapturedGraph, staging: Path) -> None:
        """Write the artifact's files into ``staging``, which exists and is empty; raises ``CompileError``."""
        ...

    def load(self, entry: Path, groups: Sequence[str] = ()) -> GraphCall:
        """Make a verified entry callable; raises ``CacheError`` when the entry is not usable here.

        ``groups`` are this process's names of the process groups the graph uses, in the graph's order.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts for the manifest that are not part of the key."""
        ...
