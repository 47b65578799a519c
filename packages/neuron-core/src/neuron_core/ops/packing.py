# SPDX-License-Identifier: Apache-2.0
"""Linear weights in the layout that the CPU device's matrix product reads front to back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from neuron_core.ops.library import PANEL

TOGETHER = {torch.bfloat16: 2, torch.float32: 1}
"""Neighbours of the inner dimension that one instruction multiplies and adds, by dtype."""


def can_pack(weight: Tensor) -> bool:
    """Whether ``weight`` is a ``[N, K]`` bfloat16 or float32 matrix the loaded kernels have a product for.

    On the meta device too: a model without weights is compiled with the shapes it will have.
    """
    ops = torch.ops.neuron
    return (
        weight.dim() == 2
        and weight.dtype in TOGETHER
        and weight.shape[1] % TOGETHER[weight.dtype] == 0
        and weight.shape[0] % PANEL == 0
        and weight.device.type in ("cpu", "meta")
        and hasattr(ops, "has_packed_linear")
        and bool(ops.has_packed_linear())
    )


def pack_linear(weight: Tensor) -> Tensor:
    """``weight [N, K]`` in panels of 32 columns, contiguous: ``[N/32, K/2, 32, 2]`` in bfloat16, ``[N/32, K, 32, 1]``
    in float32.
    """
    (columns, inner), together = weight.shape, TOGETHER[weight.dtype]
    return weight.view(columns // PANEL, PANEL, inner // together, together).permute(0, 2, 1, 3).contiguous()


def pack_module(module: nn.Module) -> int:
    """Replace the ``weight`` of every submodule with ``packable = True`` by its packed form; returns bytes packed.

    A parameter that several modules share (tied embeddings) is packed once and stays shared, so that no plain copy
    is left behind; it is left plain if one of its owners is not packable.
    """
    owners: dict[int, list[nn.Module]] = {}
    for owner in module.modules():
        weight = owner._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(owner)
    packed_bytes = 0
    for sharing in owners.values():
        weight = sharing[0]._parameters["weight"]
        if (
            weight is None
            or not all(getattr(owner, "packable", False) for owner in sharing)
            or not can_pack(weight)
        ):
            continue
        packed = nn.Parameter(pack_linear(weight.detach()), requires_grad=False)
        for owner in sharing:
            owner._parameters["weight"] = packed
        packed_bytes += packed.numel() * packed.element_size()
    return packed_bytes
