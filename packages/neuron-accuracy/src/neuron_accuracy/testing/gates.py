# SPDX-License-Identifier: Apache-2.0
"""The three-way figures of a module over several inputs, and whether they pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_accuracy.compare.limits import Gates
from neuron_accuracy.compare.metrics import bhattacharyya, finite_or_zero, log_histogram, ratio
from neuron_accuracy.compare.score import FLOOR

__all__ = ["Sample", "Verdict", "three_way"]


@dataclass(frozen=True)
class Sample:
    """What one input's errors against the baseline are: norms and largest values."""

    seed: int
    test_l2: float
    reference_l2: float
    test_linf: float
    reference_linf: float
    not_finite: int
    """Elements that are not finite on one side."""
    l2_ratio: float
    linf_ratio: float


@dataclass(frozen=True)
class Verdict:
    """Figures of one output over all inputs."""

    name: str
    samples: tuple[Sample, ...]
    bc: float
    sigma: float
    linf_ratio: float
    l2_ratio: float
    rel_l2: float
    """Of the test against the baseline, for information."""
    passed: bool


def three_way(
    name: str,
    seeds: Sequence[int],
    baseline: Sequence[Tensor],
    reference: Sequence[Tensor],
    test: Sequence[Tensor],
    gates: Gates,
) -> Verdict:
    """Hold the test's errors against those of the reference, both against the baseline: one tensor of equal shape per
    input. An error of the reference below a sixteenth of an ulp of the tensor's size counts as that.
    """
    histograms = torch.zeros(2, len(log_histogram(torch.zeros(1))), dtype=torch.int64)
    floor = FLOOR * torch.finfo(test[0].dtype).eps if test[0].is_floating_point() else 0.0
    samples, size = [], 0.0
    for seed, *tensors in zip(seeds, baseline, reference, test, strict=True):
        (b, r, t), bad = finite_or_zero(*(tensor.detach().cpu().double() for tensor in tensors))
        histograms += torch.stack([log_histogram(t - b), log_histogram(r - b)])
        samples.append(_sample(seed, t - b, r - b, b, int(bad.sum()), floor))
        size += float(b.square().sum())
    bc = bhattacharyya(histograms[0], histograms[1])
    test_norm = math.sqrt(sum(sample.test_l2**2 for sample in samples))
    reference_norm = math.sqrt(sum(sample.reference_l2**2 for sample in samples))
    sigma = ratio(test_norm, max(reference_norm, floor * math.sqrt(size)))
    linf, norm = (max(getattr(item, which) for item in samples) for which in ("linf_ratio", "l2_ratio"))
    finite = not any(sample.not_finite for sample in samples)
    passed = finite and gates.passes(bc, sigma, linf, norm)
    return Verdict(name, tuple(samples), bc, sigma, linf, norm, ratio(test_norm, math.sqrt(size)), passed)


def _sample(seed: int, test: Tensor, reference: Tensor, baseline: Tensor, bad: int, floor: float) -> Sample:
    norms = [float(error.norm()) for error in (test, reference)]
    largest = [float(error.abs().max()) if error.numel() else 0.0 for error in (test, reference)]
    size = float(baseline.norm()), float(baseline.abs().max()) if baseline.numel() else 0.0
    return Sample(
        seed,
        norms[0],
        norms[1],
        largest[0],
        largest[1],
        bad,
        ratio(norms[0], max(norms[1], floor * size[0])),
        ratio(largest[0], max(largest[1], floor * size[1])),
    )
