# SPDX-License-Identifier: Apache-2.0
"""From an ATen graph to Inductor's generated source. Imports Inductor, so only a compile does so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import CapturedGraph

__all__ = ["SETTINGS", "lower", "toolchain"]

SETTINGS: dict[str, Any] = {
    # Prepacked weights and KV tensors differ in layout and length from their captured specs.
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "nan_asserts": False,
    # Entries are cached here, by our key.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "freezing": False,
    "cpp_wrapper": False,
    "graph_partition": False,
    "compile_threads": 1,
    # A loop this short is over before a second thread has begun, or waits for one that a neighbour keeps away.
    "cpp.min_chunk_size": 1 << 15,
    "cpp.enable_kernel_profile": False,
    # Believe the CPU's own flags: the probe builds and starts a program per vector extension, seconds in all.
    "cpp.vec_isa_ok": True,
}
"""Inductor settings of every compile; part of the graph key."""


def lower(module: fx.GraphModule, graph: CapturedGraph, toolchain_dir: Path, num_threads: int) -> str:
    """Source of the Python wrapper with its C++ kernels inline; nothing is built.

    ``module`` takes ``graph``'s inputs, may mutate them, and is decomposed by Inductor's table on the way.
    Raises ``CompileError`` when Inductor cannot lower it.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.decomposition import select_decomp_table

    with graph.fake_mode:
        examples = [spec.empty("cpu") for spec in graph.input_specs]
    settings = {**SETTINGS, "cpp.threads": num_threads}
    with torch.no_grad(), config.patch(settings), toolchain(toolchain_dir), _nothing_built():
        with graph.fake_mode:
            traced = make_fx(_as_tuple(module), decomposition_table=select_decomp_table())(*examples)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        try:
            compiled: Any = compile_fx.compile_fx_inner(
                traced, examples, is_inference=True, static_input_idxs=()
            )
        except Exception as error:
            raise CompileError(f"Inductor cannot lower it: {type(error).__name__}: {error}") from error
    source = getattr(compiled, "source_code", None)
    if not isinstance(source, str):
        raise CompileError(f"Inductor returned {type(compiled).__name__} without source code")
    return source


def _as_tuple(module: fx.GraphModule) -> Any:
    def call(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(module(*args))

    return call


@contextmanager
def toolchain(folder: Path) -> Iterator[None]:
    """Inductor's own scratch files go to ``folder`` instead of a shared temporary directory."""
    folder.mkdir(parents=True, exist_ok=True)
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}):
        yield


@contextmanager
def _nothing_built() -> Iterator[None]:
    """Inductor executes the wrapper it wrote, which would start g++ for each kernel."""
    from torch._inductor.async_compile import AsyncCompile

    with mock.patch.object(AsyncCompile, "cpp_pybinding", lambda self, argtypes, source: None):
        yield
