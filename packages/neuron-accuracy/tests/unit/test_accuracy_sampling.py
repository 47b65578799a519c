# SPDX-License-Identifier: Apache-2.0
"""The sampler check: right samplers pass, samplers that ignore one parameter are named, and the bound holds."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.sampling.check import check_sampling
from neuron_accuracy.sampling.frequencies import binned, false_alarm_bound, frequencies_of
from neuron_accuracy.sampling.standing import allowed_mass, inside, standing_of
from neuron_accuracy.subjects.open import open_subject
from neuron_accuracy.subjects.protocol import Sampling
from neuron_accuracy.subjects.scores import scores_of
from neuron_accuracy.subjects.transformers import TransformersSubject

_SPEC = importlib.util.spec_from_file_location("accuracy_kit", Path(__file__).parents[1] / "accuracy_kit.py")
kit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kit)

PROMPTS = [[5, 9, 100, 4], [77, 200, 31, 8], [3, 4, 5]]


@pytest.fixture(scope="module")
def subject():
    return TransformersSubject.of(kit.tiny_llama())


class Deaf:
    """A subject that does not hear some of what a request asks."""

    def __init__(self, inner, **ignored):
        self.inner, self.ignored, self.info = inner, ignored, inner.info

    def generate(self, prompts, num_tokens, sampling, top):
        heard = [self.heard(how) for how in sampling]
        return self.inner.generate(prompts, num_tokens, heard, top)

    def heard(self, how):
        return how if how.temperature == 0 else replace(how, **self.ignored)


def kinds(outcome):
    return [finding.kind for finding in outcome.faults]


@pytest.mark.parametrize("seed", [0, 10_000, 20_000])
def test_a_right_sampler_passes(subject, seed):
    outcome = check_sampling(subject, PROMPTS, num_tokens=8, draws=200, seed=seed)
    assert outcome.passed, outcome.findings
    assert all(row["missed"] <= 1e-6 and row["outside"] == 0 for row in outcome.data["limits"])
    assert all(row["expected_if_ignored"] > 5 for row in outcome.data["limits"])


@pytest.mark.parametrize(
    ("ignored", "first"),
    [
        ({"top_p": 1.0}, "top_p ignored"),
        ({"top_k": 0}, "top_k ignored"),
        ({"min_p": 0.0}, "min_p ignored"),
        ({"top_k": 6}, "top_k exceeded"),
        ({"temperature": 1.0}, "temperature frequencies"),
    ],
)
def test_what_is_ignored_is_named(subject, ignored, first):
    class Loose(Deaf):
        def heard(self, how):
            # An exceeded limit is one that is there, but too wide.
            wide = self.ignored if "top_k" not in self.ignored or how.top_k else {}
            return how if how.temperature == 0 else replace(how, **wide)

    outcome = check_sampling(Loose(subject, **ignored), PROMPTS, num_tokens=8, draws=200)
    assert kinds(outcome)[0] == first, outcome.findings


def test_a_temperature_of_zero_that_draws_is_named(subject):
    class Drawing(Deaf):
        def heard(self, how):
            return replace(how, temperature=1.0, seed=3) if how.temperature == 0 else how

    assert kinds(check_sampling(Drawing(subject), PROMPTS, num_tokens=8, draws=200)) == [
        "temperature 0 ignored"
    ]


def test_seeds_that_all_draw_alike_are_found(subject):
    outcome = check_sampling(Deaf(subject, seed=1), PROMPTS, num_tokens=8, draws=200)
    assert "frequencies" in kinds(outcome)


def test_a_server_is_checked_by_what_it_lists(subject):
    # Flatter, so that what is not listed has weight too.
    server = kit.TinyServer(kit.tiny_llama(), kit.byte_tokenizer())
    try:
        opened = open_subject(f"server:{server.url}")
        assert check_sampling(opened, PROMPTS, num_tokens=4, draws=30).passed
        server.offers -= {"limits"}
        assert kinds(check_sampling(opened, PROMPTS, num_tokens=4, draws=30))[0] == "top_p ignored"
    finally:
        server.close()


def test_prompts_without_a_choice_are_an_error_not_a_pass(subject):
    model = kit.tiny_llama()
    with torch.no_grad():
        model.lm_head.weight *= 100
    with pytest.raises(AccuracyError, match="top_p"):
        check_sampling(TransformersSubject.of(model), PROMPTS, num_tokens=2, draws=20)
    with pytest.raises(AccuracyError, match="no prompts"):
        check_sampling(subject, [])


def test_standing_is_that_of_probabilities_by_hand():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    for top in (0, 4):
        scores = scores_of(probs.log(), [2], 0, top)
        standing = standing_of(scores, 0, 2)
        assert (standing.mass_above, standing.rank) == (pytest.approx(0.7), 2)
        assert standing.below_top == pytest.approx(math.log(2))
        for sampling, inside_too in (
            (Sampling(1.0, top_p=0.75), True),
            (Sampling(1.0, top_p=0.65), False),
            (Sampling(1.0, top_k=2), False),
            (Sampling(1.0, top_k=3), True),
            (Sampling(1.0, min_p=0.45), True),
            (Sampling(1.0, min_p=0.55), False),
        ):
            assert inside(standing, sampling, 1e-3) == inside_too, sampling
        for sampling, mass in (
            (Sampling(1.0, top_p=0.65), 0.7),
            (Sampling(1.0, top_p=0.75), 0.9),
            (Sampling(1.0, top_k=2), 0.7),
            (Sampling(1.0, min_p=0.55), 0.7),
        ):
            assert allowed_mass(scores, 0, sampling, 1e-3) == pytest.approx(mass), sampling
    listed = scores_of(probs.log(), [3], 0, 2)
    assert not inside(standing_of(listed, 0, 3), Sampling(1.0, top_p=0.65), 1e-3)
    # Two are listed, of 0.7 together: beyond 0.65 nothing unlisted passes, beyond 0.75 all of it might.
    assert allowed_mass(listed, 0, Sampling(1.0, top_p=0.65), 1e-3) == pytest.approx(0.7)
    assert allowed_mass(listed, 0, Sampling(1.0, top_p=0.75), 1e-3) == pytest.approx(1.0)


def test_equal_tokens_may_rank_either_way():
    scores = scores_of(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), [0], 0, 0)
    for token in (0, 1, 2):
        assert inside(standing_of(scores, 0, token), Sampling(1.0, top_k=1), 1e-3)
    assert not inside(standing_of(scores, 0, 3), Sampling(1.0, top_k=1), 1e-3)


def test_statistics_are_those_of_scipy():
    probs = [0.5, 0.2, 0.2, 0.07, 0.02, 0.01]
    drawn = np.random.default_rng(0).choice(6, size=200, p=probs).tolist()
    counts = frequencies_of(probs, drawn)
    expected = stats.chisquare(counts.observed, counts.expected)
    assert counts.chi_square == pytest.approx(expected.statistic)
    assert counts.p_value == pytest.approx(expected.pvalue)
    g = stats.power_divergence(counts.observed, counts.expected, lambda_="log-likelihood")
    assert counts.excess == pytest.approx(g.statistic / 2)
    assert min(counts.expected) >= 5 and sum(counts.observed) == 200
    assert frequencies_of(probs, [*drawn, -1]).false_alarm == 0.0


def test_bins_do_not_look_at_draws():
    assert binned([0.6, 0.3, 0.05, 0.05], 20) == [[0], [1, 2, 3]]
    assert binned([0.4, 0.3, 0.15, 0.15], 20) == [[0], [1], [2, 3]]
    assert binned([0.1] * 10, 20) == [list(range(10))]
    assert binned([1.0, 0.0], 20) == [[0]]


def test_false_alarms_are_rarer_than_the_bound():
    source = np.random.default_rng(1)
    probs = np.array([0.3, 0.3, 0.2, 0.1, 0.1])
    counts = source.multinomial(100, probs, size=20_000)
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(counts > 0, counts * np.log(counts / (100 * probs)), 0).sum(axis=1)
    for level in (6, 8, 10):
        assert (excess >= level).mean() <= false_alarm_bound(level, 5)
    # It is a bound that can be met: of four degrees of freedom at 1e-6, G is 33 by the chi-square.
    assert false_alarm_bound(26, 5) < 1e-6 < false_alarm_bound(stats.chi2.isf(1e-6, 4) / 2, 5)
