# SPDX-License-Identifier: Apache-2.0
"""Embeddings that take the place of tokens: two inputs of the graphs of an engine that accepts them, and of no other.

They are always there in such an engine, so that a step of tokens alone and a mixed one are the same graph.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from neuron_core.protocols import StaticModel

__all__ = [
    "IS_TOKEN",
    "PROMPT_EMBEDS",
    "EmbedsModel",
    "only_tokens",
    "prompt_embed_specs",
    "takes_prompt_embeds",
]

PROMPT_EMBEDS = "prompt_embeds"
"""Name of the embeddings among a program's inputs: ``[T, hidden]`` in the model's dtype; anything at a token."""

IS_TOKEN = "is_token"
"""Name of the choice among a program's inputs: int32 ``[T]``, 0 where the embedding counts and not the token id."""


@runtime_checkable
class EmbedsModel(Protocol):
    """What a `StaticModel` has besides if it can take embeddings."""

    takes_prompt_embeds: bool
    """Whether its programs take both inputs; false until the engine asks for it."""


def takes_prompt_embeds(model: StaticModel) -> bool:
    """Whether the model's programs take embeddings beside token ids."""
    return isinstance(model, EmbedsModel) and model.takes_prompt_embeds


def prompt_embed_specs(num_tokens: int, model: StaticModel) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of both inputs by name; nothing for a model that takes token ids alone."""
    if not takes_prompt_embeds(model):
        return {}
    return {
        PROMPT_EMBEDS: ((num_tokens, model.hidden_size), model.dtype),
        IS_TOKEN: ((num_tokens,), torch.int32),
    }


def only_tokens(num_tokens: int, model: StaticModel) -> dict[str, torch.Tensor]:
    """Both inputs of a step without an embedding; nothing for a model that takes token ids alone."""
    specs = prompt_embed_specs(num_tokens, model)
    fill = {PROMPT_EMBEDS: 0, IS_TOKEN: 1}
    return {name: torch.full(shape, fill[name], dtype=dtype) for name, (shape, dtype) in specs.items()}
