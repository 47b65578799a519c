# SPDX-License-Identifier: Apache-2.0
"""Drawing a token from logits, in the order vLLM applies its limits: temperature, min-p, top-k, top-p."""

from __future__ import annotations

import torch

from neuron_accuracy.subjects.protocol import Sampling

__all__ = ["draw", "generator_of", "limited"]


def generator_of(sampling: Sampling) -> torch.Generator:
    """The source of a request's draws: its own if it has a seed."""
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def limited(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities float64 ``[V]`` that a token is drawn from, given float logits ``[V]``; temperature above zero."""
    probs = (logits.double() / sampling.temperature).softmax(-1)
    probs = probs.where(probs >= sampling.min_p * probs.max(), 0.0)
    if sampling.top_k <= 0 and sampling.top_p >= 1.0:
        return probs / probs.sum()
    order = probs.argsort(descending=True, stable=True)
    ranked = probs[order] / probs.sum()
    if sampling.top_k > 0:
        ranked[sampling.top_k :] = 0.0
        ranked = ranked / ranked.sum()
    before = ranked.cumsum(-1) - ranked
    ranked = ranked.where(before < sampling.top_p, 0.0)
    kept = torch.zeros_like(probs)
    kept[order] = ranked / ranked.sum()
    return kept


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token id, given float logits ``[V]``; at temperature 0 the likeliest, the lowest id of several."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(limited(logits, sampling), 1, generator=generator))
