# SPDX-License-Identifier: Apache-2.0
"""Prompts: what is refused (HTTP 400) before it reaches the engine, and the form that embeddings get.

vLLM lets ids through that the tokenizer has and the model has not, and all of them where there is no tokenizer. Of
embeddings it checks width and type where a payload is decoded, not where a tensor is given, and values and ids nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

__all__ = ["admit_embeds", "check_layout", "check_tokens"]

FIELD = "prompt_embeds"
MASK = "prompt_is_token_ids"


def admit_embeds(prompt: dict[str, Any], model: ModelConfig) -> Tensor:
    """The embeddings of vLLM's ``EmbedsInput`` in the model's type, contiguous and owning their memory.

    Rows at tokens, which nothing reads, are NaN: vLLM tells cached blocks apart by ids and rows, and else a token
    of id 0 would be the same as an embedding of zeros. Raises ``VLLMValidationError`` naming what is wrong.
    """
    if not model.enable_prompt_embeds:
        raise VLLMValidationError("prompt_embeds need an engine with --enable-prompt-embeds", parameter=FIELD)
    embeds = _of_the_model(prompt["prompt_embeds"], model)
    is_token = _mask(prompt, len(embeds), model.get_vocab_size())
    finite = embeds.isfinite().all(dim=1) | is_token
    if not bool(finite.all()):
        row = int(finite.int().argmin())
        reason = f"prompt_embeds has a value in row {row} that is not finite in {embeds.dtype}"
        raise VLLMValidationError(reason, parameter=FIELD)
    return embeds.masked_fill(is_token.unsqueeze(1), float("nan"))


def check_tokens(token_ids: Sequence[int], model: ModelConfig) -> None:
    """Raise ``VLLMValidationError`` naming the first of ``token_ids`` that is none of the model's."""
    vocab_size = model.get_vocab_size()
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        place = next(place for place, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        _refuse_token(place, token_ids[place], vocab_size)


def _refuse_token(place: int, token_id: int, vocab_size: int) -> None:
    reason = (
        f"prompt_token_ids[{place}] is {token_id}; tokens of this model are 0 to {vocab_size - 1}, "
        f"also if its tokenizer has more"
    )
    raise VLLMValidationError(reason, parameter="prompt_token_ids", value=token_id)


def check_layout(tensor: object, parameter: str) -> None:
    """Raise ``VLLMValidationError`` for a tensor that no conversion makes dense."""
    if isinstance(tensor, Tensor) and (tensor.is_nested or tensor.is_meta):
        kind = "nested" if tensor.is_nested else "on the meta device, which has no data"
        raise VLLMValidationError(f"{parameter} is {kind}; use a dense tensor", parameter=parameter)


def _of_the_model(embeds: Tensor, model: ModelConfig) -> Tensor:
    width = model.get_hidden_size()
    if embeds.dim() != 2 or embeds.shape[1] != width:
        shape = list(embeds.shape)
        reason = f"prompt_embeds has shape {shape}; this model takes [tokens, {width}]"
        raise VLLMValidationError(reason, parameter=FIELD)
    if not len(embeds):
        raise VLLMValidationError("prompt_embeds is empty; a prompt has at least one row", parameter=FIELD)
    if not embeds.is_floating_point():
        reason = f"prompt_embeds is {embeds.dtype}; use floating-point numbers, such as {model.dtype}"
        raise VLLMValidationError(reason, parameter=FIELD)
    if embeds.device.type != "cpu" or embeds.layout is not torch.strided:
        reason = f"prompt_embeds is {embeds.layout} on {embeds.device.type}; use a dense tensor on the CPU"
        raise VLLMValidationError(reason, parameter=FIELD)
    # A copy: what was decoded may need gradients, or be a small view of a large storage.
    return embeds.detach().to(model.dtype, copy=True, memory_format=torch.contiguous_format)


def _mask(prompt: dict[str, Any], length: int, vocab_size: int) -> Tensor:
    """Which of ``length`` places hold tokens, bool ``[length]``."""
    ids, given = prompt.get("prompt_token_ids"), prompt.get("is_token_ids")
    if ids is None and given is None:
        return torch.zeros(length, dtype=torch.bool)
    if ids is None or given is None or not len(ids) == len(given) == length:
        lengths = [None if part is None else len(part) for part in (ids, given)]
        reason = (
            f"beside {length} embeddings, prompt_token_ids and {MASK} must both have {length} entries or both be "
            f"left out; they have {lengths[0]} and {lengths[1]}"
        )
        raise VLLMValidationError(reason, parameter=MASK)
    for place, (token_id, is_token) in enumerate(zip(ids, given, strict=True)):
        if is_token and not 0 <= token_id < vocab_size:
            _refuse_token(place, token_id, vocab_size)
    return torch.tensor([bool(is_token) for is_token in given])
