# SPDX-License-Identifier: Apache-2.0
"""Loads an ``inductor`` entry, the wrapper's source and the kernels' shared object, without Inductor."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
from cmath import nanj
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from neuron_core.errors import CacheError
from neuron_core.graphs.compilers.base import ArtifactMetadata
from neuron_core.protocols import GraphCall

__all__ = ["EXTERN_KERNELS", "KERNELS_FILE", "WRAPPER_FILE", "load_wrapper", "wrapper_namespace"]

WRAPPER_FILE = "wrapper.py"
KERNELS_FILE = "kernels.so"

EXTERN_KERNELS: Mapping[str, Any] = {
    "mm": torch.mm,
    "addmm": torch.addmm,
    "bmm": torch.bmm,
    "baddbmm": torch.baddbmm,
    "convolution": torch.convolution,
}
"""Inductor's ``extern_kernels`` that are plain ATen functions."""


def wrapper_namespace() -> dict[str, Any]:
    """Globals Inductor's generated CPU code expects (its own preamble imports them from Inductor)."""
    guards: Any = torch._C._dynamo.guards
    return {
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "nanj": nanj,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "_quantized": torch.ops._quantized,
        "assert_size_stride": guards.assert_size_stride,
        "assert_alignment": guards.assert_alignment,
        "empty_strided_cpu": guards._empty_strided_cpu,
        "reinterpret_tensor": guards._reinterpret_tensor,
        "alloc_from_pool": torch.ops.inductor._alloc_from_pool,
        "extern_kernels": SimpleNamespace(**EXTERN_KERNELS),
    }


def load_wrapper(entry: Path, metadata: ArtifactMetadata, groups: Sequence[str] = ()) -> GraphCall:
    """The wrapper's ``call``; raises ``CacheError`` when source or shared object cannot be loaded here."""
    path = entry / WRAPPER_FILE
    namespace = wrapper_namespace()
    try:
        source = metadata.rename_groups(path.read_text(), tuple(groups))
        if (entry / KERNELS_FILE).exists():
            namespace.update(_load_kernels(entry / KERNELS_FILE))
        exec(compile(source, str(path), "exec"), namespace)
        call: GraphCall = namespace["call"]
    except (OSError, SyntaxError, KeyError, ImportError) as error:
        raise CacheError(f"{entry} cannot be loaded: {error}") from error
    return call


def _load_kernels(path: Path) -> dict[str, Any]:
    loader = importlib.machinery.ExtensionFileLoader("kernels", str(path))
    spec = importlib.util.spec_from_loader("kernels", loader)
    if spec is None:
        raise ImportError(f"{path} has no loader")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.bind(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]
    return {name: value for name, value in vars(module).items() if name.startswith("cpp_")}
