# SPDX-License-Identifier: Apache-2.0
"""Tokens drawn with the runner's own random numbers follow the exact distribution of the settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from neuron_core import ops
from vllm_neuron.runner.randomness import uniforms

DRAWS = 20_000
VOCAB = 40
LOGITS = np.sort(np.random.default_rng(5).normal(0.0, 2.0, VOCAB))[
    np.random.default_rng(6).permutation(VOCAB)
]


@pytest.fixture(scope="module", autouse=True)
def kernels(graph_cache: Path) -> None:
    ops.load_kernels(graph_cache)


def exact(temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution in float64, in vLLM's order: temperature, min-p, top-k, top-p."""
    mass = np.exp(LOGITS / temperature - (LOGITS / temperature).max())
    mass /= mass.sum()
    mass[mass < min_p * mass.max()] = 0.0
    order = np.argsort(-mass)
    if top_k:
        mass[order[top_k:]] = 0.0
    mass /= mass.sum()
    kept = np.searchsorted(np.cumsum(mass[order]), top_p) + 1
    mass[order[kept:]] = 0.0
    return mass / mass.sum()


def draw(seeds: np.ndarray, places: np.ndarray, settings: tuple[float, int, float, float]) -> np.ndarray:
    temperature, top_k, top_p, min_p = settings
    full = torch.full((DRAWS,), 1.0)
    return ops.sample(
        torch.tensor(LOGITS, dtype=torch.float32).expand(DRAWS, VOCAB).contiguous(),
        full * temperature,
        (full * top_k).int(),
        full * top_p,
        full * min_p,
        torch.from_numpy(uniforms(seeds, places)),
    ).numpy()


@pytest.mark.supports("temperature, top-k, top-p, min-p", model="any")
@pytest.mark.parametrize("stream", ["one request's places", "many requests' first token"])
@pytest.mark.parametrize(
    "settings",
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.5, 0, 1.0, 0.0),
        (1.0, 7, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.7, 10, 0.9, 0.02),
        (1.5, 3, 0.95, 0.05),
    ],
    ids=str,
)
def test_draws_agree_with_the_exact_distribution(settings, stream):
    steps = np.arange(DRAWS)
    fixed = np.full(DRAWS, 12)
    seeds, places = (fixed, steps) if stream.startswith("one") else (steps, fixed)
    tokens = draw(seeds.astype(np.uint64), places, settings)
    expected = exact(*settings)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[expected == 0.0].sum() == 0
    # Chi-square wants at least five expected draws in each cell; the rarest tokens share one.
    rare = expected * DRAWS < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum()) * DRAWS
    if wanted[-1] == 0.0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert chisquare(observed, wanted).pvalue > 1e-4
