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
from neuron_accuracy.sampling.draws import check_frequencies
from neuron_accuracy.sampling.expected import expected_of
from neuron_accuracy.sampling.frequencies import binned, false_alarm_bound, frequencies_of
from neuron_accuracy.sampling.standing import allowed_mass, inside, standing_of
from neuron_accuracy.subjects.drawing import draw, generator_of
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.open import open_subject
from neuron_accuracy.subjects.protocol import Generation, Sampling
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


class Rows:
    """A subject of fixed rows of log-probabilities, after a prompt and after its first token; lists 20 if asked to."""

    VOCAB = 400

    def __init__(self, first, later=None, *, listing=False, heard=lambda how: how, batch=0.0):
        self.rows = [first, first if later is None else later]
        self.listing, self.heard, self.batch = listing, heard, batch
        self.abilities = frozenset({"logprobs" if listing else "logits", "generate"})

    def info(self):
        return SubjectInfo("rows", "m", "r", "float32", self.VOCAB, "t", self.abilities)

    def drawn(self, row, how):
        if how.temperature == 0:
            return int(row.argmax())
        shifted = row.clone()
        shifted[0] += self.batch
        return draw(shifted, self.heard(how), generator_of(how))

    def generate(self, prompts, num_tokens, sampling, top):
        made = []
        for prompt, how in zip(prompts, sampling, strict=True):
            rows = torch.stack([self.rows[min(at, 1)] for at in range(num_tokens)])
            tokens = [self.drawn(row, how) for row in rows]
            made.append(
                Generation(
                    tuple(prompt), tuple(tokens), scores_of(rows, tokens, len(prompt), top * self.listing)
                )
            )
        return made


def logits_of(seed=0, scale=2.0):
    return torch.randn(Rows.VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def drawn_first(subject, draws=100, top_p=0.5):
    """The rows by case and the kinds found of the frequencies of the first token alone."""
    (greedy,) = subject.generate([PROMPTS[0]], 1, [Sampling()], 20)
    rows, found = check_frequencies(subject, greedy, draws, top_p=top_p, false_alarm=1e-6, seed=0)
    return {row["name"]: row for row in rows}, [finding.kind for finding in found]


@pytest.mark.parametrize("above", [0, 20])
def test_what_a_listing_leaves_out_is_bounded_at_another_temperature(above):
    class Flat(Rows):
        def drawn(self, row, how):
            if how.temperature != 0.5:
                return super().drawn(row, how)
            tokens = row.argsort(descending=True)[above:]
            return int(tokens[torch.randint(len(tokens), (1,), generator=generator_of(how))])

    assert drawn_first(Rows(logits_of(), listing=True))[1] == []
    assert drawn_first(Flat(logits_of(), listing=True))[1] == ["temperature frequencies"]


def test_unlisted_tokens_have_at_most_the_share_that_is_bounded():
    for seed in range(20):
        row = logits_of(seed, scale=1.0 + seed % 4)
        scores = scores_of(row[None], [0], 0, 20)
        for temperature in (0.3, 0.5, 1.0):
            expected = expected_of(scores, Sampling(temperature))
            shares = (row.double() / temperature).softmax(-1)
            listed = shares[scores.top_ids[0]]
            least, most = expected.between
            assert least <= 1 - float(listed.sum()) <= most
            assert expected.probs == pytest.approx((listed / listed.sum()).tolist(), rel=1e-4)


@pytest.mark.parametrize("listing", [False, True])
@pytest.mark.parametrize("batch", [1e-3, -1e-3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_token_at_the_edge_of_top_p_may_be_kept_or_not(batch, tied, listing):
    """Rounding in another batch decides which side of the edge a token is on, and which of equals ranks first."""
    masses = [0.3, 0.2, 0.2, 0.1, 0.05] if tied else [0.2999, 0.2, 0.15, 0.1, 0.05]
    edge = 0.4 if tied else sum(masses[:2]) + 1e-4
    row = torch.full((Rows.VOCAB,), (1 - sum(masses)) / (Rows.VOCAB - len(masses)))
    row[:5] = torch.tensor(masses)

    class OtherOfEquals(Rows):
        def drawn(self, row, how):
            token = super().drawn(row, how)
            return 2 if tied and token == 1 and how.top_p < 1 else token

    rows, found = drawn_first(OtherOfEquals(row.log(), listing=listing, batch=batch), 200, edge)
    assert found == [] and rows["top_p"]["false_alarm"] > 1e-3
    wide = Rows(row.log(), listing=listing, heard=lambda how: replace(how, top_p=min(how.top_p + 0.35, 1.0)))
    assert drawn_first(wide, 200, edge)[1] == ["top_p frequencies"]


def test_an_open_outcome_does_not_raise_false_alarms():
    """Simulated: of a share anywhere between its bounds, the largest included."""
    source = np.random.default_rng(2)
    probs = np.array([0.5, 0.3, 0.2])
    for share in (0.0, 0.1, 0.2):
        true = [*(probs * (1 - share)), share]
        seen = [
            frequencies_of(probs.tolist(), source.choice(4, size=60, p=true).tolist(), (0.0, 0.2))
            for _ in range(500)
        ]
        assert {len(counts.observed) for counts in seen} == {4}
        for level in (3, 5, 7):
            assert np.mean([counts.excess >= level for counts in seen]) <= false_alarm_bound(level, 4)
    assert frequencies_of([1.0], [1] * 60, (0.0, 0.2)).false_alarm < 1e-6
    none = frequencies_of([0.5, 0.5], [0, 1] * 30, (0.0, 0.2))
    assert (none.chi_square, none.p_value) == (0.0, 1.0)
    assert frequencies_of([1.0], [0] * 48 + [1] * 12, (0.0, 0.2)).excess == pytest.approx(0.0, abs=1e-9)


def test_one_outcome_is_an_error_not_a_pass():
    certain = logits_of()
    certain[5] = 40
    for listing in (False, True):
        deaf = Rows(certain, logits_of(1), listing=listing, heard=lambda how: replace(how, temperature=1.0))
        with pytest.raises(AccuracyError, match=r"frequencies under seed, temperature.*likely work"):
            check_sampling(deaf, PROMPTS, num_tokens=8, draws=100)
    # One token is kept: any other would have shown.
    half = torch.full((Rows.VOCAB,), 0.4 / (Rows.VOCAB - 1))
    half[7] = 0.6
    rows, found = drawn_first(Rows(half.log()))
    assert found == [] and [row["undecided"] for row in rows.values()] == [False] * 3
    assert rows["top_p"]["bins"] == 1
    deaf = Rows(half.log(), heard=lambda how: replace(how, temperature=1.0))
    assert drawn_first(deaf)[1] == ["temperature frequencies"]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_an_error(number):
    class Mute(Rows):
        def generate(self, prompts, num_tokens, sampling, top):
            made = super().generate(prompts, num_tokens, sampling, top)
            for item in made if sampling[0].temperature else ():
                item.scores.top_logprobs.fill_(number)
            return made

    deaf = Mute(logits_of(), listing=True, heard=lambda how: replace(how, top_k=0, min_p=0.0))
    with pytest.raises(AccuracyError, match="prompt 0 at temperature 1: the scores are NaN or infinite"):
        check_sampling(deaf, PROMPTS, num_tokens=8, draws=100)


@pytest.mark.parametrize(
    "arguments, said", [({"draws": 0}, "300"), ({"draws": 9}, "300"), ({"num_tokens": 0}, "16")]
)
def test_too_few_draws_are_an_error(subject, arguments, said):
    with pytest.raises(AccuracyError, match=f"must be at least .*; {said} works"):
        check_sampling(subject, PROMPTS, **arguments)
    assert false_alarm_bound(1.0, 0) == 1.0


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
    assert binned([0.1] * 10, 20) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert binned([0.1] * 10, 9) == [list(range(10))]
    assert binned([1.0, 0.0], 20) == [[0]]
    assert binned([0.99, 0.005, 0.005], 20) == [[0], [1, 2]]


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
