# SPDX-License-Identifier: Apache-2.0
"""How a model's tensors are spread over ranks, and what transformers calls them: what a comparison must know."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from neuron_accuracy.layout import Rows, Sharding, Slice, TensorLayout
from neuron_core.graphs.buckets import Phase
from neuron_core.graphs.taps import Tap
from neuron_models.attention import PagedAttention
from neuron_models.llama.model import LlamaDecoderLayer
from neuron_models.rope import RotaryTable
from neuron_parallel import (
    ColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = ["as_rows", "is_shared", "layouts", "names"]

SPLIT_ROWS = TensorLayout(Sharding.SHARDED, dim=0)
"""Prefill with more than one rank: the tokens between blocks are split over them."""


def as_rows(model: nn.Module, tap: Tap, tensor: Tensor) -> Tensor:
    """A captured tensor as ``[rows, features]``: heads side by side, and the rotary table for both halves of a head."""
    flat = tensor.flatten(1) if tensor.dim() > 2 else tensor
    owner = _module(model, tap.module)
    is_table = isinstance(owner, RotaryTable) and tap.tensor.startswith("output.")
    return torch.cat((flat, flat), dim=-1) if is_table else flat


def is_shared(model: nn.Module, tap: Tap) -> bool:
    """Whether a tensor is handed to every layer alike (positions, block tables, the rank): it is no layer's own."""
    kind, _, index = tap.tensor.partition(".")
    if kind != "input":
        return False
    owner = _module(model, tap.module)
    is_layer = isinstance(owner, LlamaDecoderLayer) and int(index.partition("@")[0]) > 1
    return is_layer or (isinstance(owner, VocabParallelEmbedding) and index != "0")


def layouts(model: nn.Module, size: int) -> dict[str, TensorLayout]:
    """By ``module:tensor`` or ``module:tensor@phase``, of a model over ``size`` tensor-parallel ranks.

    What is not among them is whole on every rank, a row per token.
    """
    found: dict[str, TensorLayout] = {}
    for name, module in model.named_modules():
        for tensor, layout, split in _tensors(model, name, module, size):
            found[f"{name}:{tensor}"] = layout
            if split:
                found[f"{name}:{tensor}@{Phase.PREFILL}"] = SPLIT_ROWS
    return found


def names(model: nn.Module) -> dict[str, str]:
    """What transformers calls tensors of a decoder, where it has the same under another name.

    A layer of ours gives its result and the residual apart. Their sum is the next norm's second output, and what
    transformers' layer gives; what is but a summand is named ``branch.…``, which transformers has nowhere.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, ColumnParallelLinear) and (blocks := module.blocks)[0].name:
            for block in blocks:
                found[f"{name}:output.0:{block.name}"] = f"{parent}.{block.name}:output.0"
            found[f"{name}:input.0"] = f"{parent}.{blocks[0].name}:input.0"
        elif isinstance(module, PagedAttention):
            found[f"{name}:output.0"] = f"{parent}.o_proj:input.0"
            found[f"{parent}.o_proj:input.0"] = f"{parent}.o_proj:given.input.0"  # the same once more
        elif isinstance(module, RotaryTable):
            found.update({f"{name}:output.{i}": f"model.rotary_emb:output.{i}" for i in range(2)})
    layers = getattr(getattr(model, "model", None), "layers", ())
    for index in range(len(layers)):
        found.update(_branches(f"model.layers.{index}"))
        following = f"model.layers.{index + 1}.input_layernorm" if index + 1 < len(layers) else "model.norm"
        found[f"{following}:output.1"] = f"model.layers.{index}:output.0"
        found[f"model.layers.{index}.post_attention_layernorm:output.1"] = (
            f"model.layers.{index}.post_attention_layernorm:input.0"
        )
    if len(layers):
        found["model.layers.0.input_layernorm:output.1"] = "model.layers.0:input.0"
        found["model.norm:input.0"] = "model.norm:branch.input.0"
    return found


def _branches(layer: str) -> dict[str, str]:
    tensors = [(layer, "input.0"), (layer, "output.0")]
    tensors += [(f"{layer}.{norm}", "input.0") for norm in ("input_layernorm", "post_attention_layernorm")]
    return {f"{module}:{tensor}": f"{module}:branch.{tensor}" for module, tensor in tensors}


def _tensors(
    model: nn.Module, name: str, module: nn.Module, size: int
) -> Iterator[tuple[str, TensorLayout, bool]]:
    """Tensor, layout, and whether prefill splits its rows over ranks instead."""
    several = size > 1
    features = TensorLayout(Sharding.SHARDED)
    if isinstance(module, ColumnParallelLinear):
        yield "output.0", _column(module, size), False
        yield "input.0", TensorLayout(), several
    elif isinstance(module, RowParallelLinear):
        yield "input.0", features, False
        yield "output.0", TensorLayout(), several
    elif isinstance(module, PagedAttention):
        yield "input.0", features, False
        yield "input.1", _kv(module, size), False
        yield "input.2", _kv(module, size), False
        yield "output.0", features, False
    elif name.endswith((".q_norm", ".k_norm")):
        attention = model.get_submodule(f"{name.rpartition('.')[0]}.attn")
        assert isinstance(attention, PagedAttention)
        layout = features if name.endswith(".q_norm") else _kv(attention, size)
        yield "input.0", layout, False
        yield "output.0", layout, False
    elif isinstance(module, ParallelLMHead):
        yield "input.0", TensorLayout(rows=Rows.REQUESTS), False
        yield "output.0", TensorLayout(rows=Rows.REQUESTS), False
    elif isinstance(module, VocabParallelEmbedding):
        yield "output.0", TensorLayout(), several
    elif not isinstance(module, RotaryTable):
        for tensor in ("input.0", "input.1", "output.0", "output.1"):
            yield tensor, TensorLayout(), several


def _column(module: ColumnParallelLinear, size: int) -> TensorLayout:
    blocks = module.blocks
    slices = tuple(Slice(block.name, block.size, size // block.parts) for block in blocks)
    heads = (
        sum(block.size for block in blocks) // module.head_dim
        if isinstance(module, QKVParallelLinear)
        else None
    )
    return TensorLayout(Sharding.SHARDED, slices=slices, heads=heads)


def _kv(module: PagedAttention, size: int) -> TensorLayout:
    replicas = max(1, size // module.num_kv_heads)
    whole = Slice("", module.num_kv_heads * module.head_dim, replicas)
    return TensorLayout(Sharding.SHARDED, slices=(whole,), heads=module.num_kv_heads)


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # a part's own
        return None
