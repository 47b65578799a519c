# SPDX-License-Identifier: Apache-2.0
"""Logit validation: figures recomputed by numpy, planted faults, and comparisons that cannot be made."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.special import log_softmax

from neuron_accuracy.cli.main import cli
from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Severity
from neuron_accuracy.logits.limits import FLOAT32, HALF, Limits, parse_limits
from neuron_accuracy.logits.measures import measure
from neuron_accuracy.logits.noise import Noise
from neuron_accuracy.logits.pairs import pair
from neuron_accuracy.logits.prompts import default_prompts, encode_prompts, read_prompts
from neuron_accuracy.logits.validate import validate_logits
from neuron_accuracy.subjects.open import open_subject
from neuron_accuracy.subjects.protocol import Scores
from neuron_accuracy.subjects.scores import scores_of
from neuron_accuracy.subjects.transformers import TransformersSubject
from neuron_core.errors import ConfigError

_SPEC = importlib.util.spec_from_file_location("accuracy_kit", Path(__file__).parents[1] / "accuracy_kit.py")
kit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kit)

PROMPTS = [[5, 9, 100, 4], [77, 200, 31, 8, 60, 12], [9, 8, 7]]


@pytest.fixture(scope="module")
def reference():
    return TransformersSubject.of(kit.tiny_llama(), kit.byte_tokenizer())


@pytest.fixture
def server():
    server = kit.TinyServer(kit.tiny_llama(), kit.byte_tokenizer())
    yield server
    server.close()


def changed(scale=1.02, **overrides):
    model = kit.tiny_llama(**overrides)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3] *= scale
    return TransformersSubject.of(model, kit.byte_tokenizer())


class Edited:
    """A subject whose logits of given generated tokens are changed, forced or in its own generation."""

    def __init__(self, inner, edit, tokens, own=True, forced=True):
        self.inner, self.edit, self.at = inner, edit, tokens
        self.own, self.forced = own, forced
        self.info, self.encode, self.decode = inner.info, inner.encode, inner.decode

    def _changed(self, scores):
        for token in self.at:
            if token < len(scores.logits):
                scores.logits[token] = self.edit(scores.logits[token])
        return scores

    def force(self, prompts, continuations, top):
        given = self.inner.force(prompts, continuations, top)
        return [self._changed(item) for item in given] if self.forced else given

    def generate(self, prompts, num_tokens, sampling, top):
        made = self.inner.generate(prompts, num_tokens, sampling, top)
        for item in made if self.own and top == 0 else ():
            self._changed(item.scores)
        return made


def faults(outcome):
    return [(finding.kind, finding.where) for finding in outcome.faults]


def test_errors_are_those_of_numpy(reference):
    torch.manual_seed(0)
    ours, theirs = torch.randn(4, 300) * 3, torch.randn(4, 300) * 3
    tokens = [1, 2, 3, 4]
    measured = measure(pair(scores_of(ours, tokens, 0, 0), scores_of(theirs, tokens, 0, 0)), HALF)
    r, t = ours.numpy(), theirs.numpy()
    order = np.argsort(-r, axis=1)
    scale = np.abs(r).max(axis=1)
    for k, count in {5: 5, 50: 50, 1000: 300, 0: 300}.items():
        taken = order[:, :count]
        worst = np.abs(np.take_along_axis(t - r, taken, 1)).max(axis=1) / scale
        assert measured.errors[k].tolist() == pytest.approx(worst.tolist(), rel=1e-5)
    p, q = np.exp(log_softmax(r, axis=1)), np.exp(log_softmax(t, axis=1))
    assert measured.divergence.tolist() == pytest.approx((p * np.log(p / q)).sum(axis=1).tolist(), rel=1e-4)
    assert measured.variation.tolist() == pytest.approx((np.abs(p - q).sum(axis=1) / 2).tolist(), rel=1e-4)
    likely = order[:, :20]
    assert measured.mass.tolist() == pytest.approx(
        np.take_along_axis(q, likely, 1).sum(axis=1).tolist(), rel=1e-4
    )
    assert measured.margin.tolist() == pytest.approx(
        (np.sort(r, axis=1)[:, -1] - np.sort(r, axis=1)[:, -2]).tolist(), rel=1e-5
    )


def test_limits_bind_by_rank_and_at_the_limit():
    row = torch.tensor([[10.0, 5.0, 1.0, 0.0]])
    limits = Limits({2: 0.01, 0: 0.1}, atol=0.0)

    def beyond(*change):
        test = row + torch.tensor([list(change)])
        return bool(measure(pair(scores_of(row, [0], 0, 0), scores_of(test, [0], 0, 0)), limits).beyond[0])

    assert not beyond(0.09, -0.09, 0.9, -0.9)
    assert beyond(0.11, 0, 0, 0) and beyond(0, -0.11, 0, 0)
    assert beyond(0, 0, 1.1, 0)


def test_what_a_server_does_not_list_is_no_difference():
    torch.manual_seed(1)
    logits = torch.randn(3, 40)
    ours, theirs = scores_of(logits, [0, 1, 2], 0, 0), scores_of(logits, [0, 1, 2], 0, 6)
    for one, two in ((ours, theirs), (theirs, ours), (theirs, scores_of(logits, [0, 1, 2], 0, 9))):
        pairs = pair(one, two)
        assert not pairs.whole
        assert float(pairs.difference.abs().max()) < 1e-6
    moved = logits.clone()
    last = int(logits[1].argmin())
    moved[1, last] = logits[1].max() + 2
    shown = pair(theirs, scores_of(moved, [0, 1, 2], 0, 6))
    assert last in shown.ids[1].tolist()
    # The reference lists six: the seventh is at most the sixth's, and the test says it is the first.
    assert float(shown.difference[1].max()) > 1.0
    assert float(shown.difference[0].abs().max()) < 1e-6


MASKS = [torch.finfo(torch.float32).min, -1e9, -65504.0, -1e4]


def beyond(reference, test):
    return bool(measure(pair(reference, test), HALF).beyond.any())


@pytest.mark.parametrize("mask", MASKS)
def test_a_masked_column_is_no_scale(mask):
    torch.manual_seed(2)
    tokens = [0, 1, 2]
    ours, theirs = torch.randn(3, 64) * 3 - 20, torch.randn(3, 64) * 3 - 20
    ours[:, 63] = theirs[:, 63] = mask
    reference = scores_of(ours, tokens, 0, 0)
    assert beyond(reference, scores_of(theirs, tokens, 0, 0))
    assert float(pair(reference, reference).scale.max()) < 50
    # Masked alike to another number, as by the lowest of another dtype: neither is ever drawn.
    other = ours.clone()
    other[:, 63] = torch.tensor(mask).bfloat16().float() / 2
    assert not beyond(reference, scores_of(other, tokens, 0, 0))
    listed = scores_of(other, tokens, 0, 64)
    assert not beyond(reference, listed) and not beyond(listed, reference)
    for one_sided in (ours, other):
        shown = one_sided.clone()
        shown[1, 63] = -20.0
        assert beyond(reference, scores_of(shown, tokens, 0, 0))
        assert beyond(scores_of(shown, tokens, 0, 0), reference)


@pytest.mark.parametrize("offset, mask", [(1e5, 0.0), (0.0, -1e9)])
def test_the_test_has_no_part_in_the_scale(offset, mask):
    torch.manual_seed(3)
    reference = scores_of(torch.randn(3, 64) * 3, [0, 1, 2], 0, 20)
    rows = torch.randn(3, 64) * 3 + offset
    rows[:, 63] += mask
    test = scores_of(rows, [0, 1, 2], 0, 0)
    assert beyond(reference, test)
    assert torch.equal(pair(reference, test).scale, reference.top_logprobs.abs().amax(1))


def without_ranks(logits, tokens, omitted):
    """A server's scores that leave out tokens of these ranks and list others for them."""
    scores = scores_of(logits, tokens, 0, 20 + len(omitted))
    kept = [rank for rank in range(20 + len(omitted)) if rank not in omitted]
    return Scores(0, scores.chosen_logprobs, scores.top_ids[:, kept], scores.top_logprobs[:, kept])


def test_what_the_other_side_has_and_a_server_omits_is_compared():
    torch.manual_seed(4)
    logits, tokens = torch.randn(3, 64) * 3, [0, 1, 2]
    whole, listed = scores_of(logits, tokens, 0, 0), without_ranks(logits, tokens, ())
    assert not beyond(whole, listed) and not beyond(listed, whole)
    omitting = without_ranks(logits, tokens, (1, 2, 3))
    assert beyond(whole, omitting) and beyond(omitting, whole)
    # Noise that swaps ranks at the end of the list is no omission.
    swapped = without_ranks(logits + 0.02 * torch.randn(3, 64), tokens, ())
    assert not beyond(whole, swapped) and not beyond(swapped, whole)


@pytest.mark.parametrize("strange", [64, -1])
def test_a_token_id_beyond_the_vocabulary_is_an_error(strange):
    whole = scores_of(torch.randn(1, 64), [0], 0, 0)
    listed = scores_of(torch.randn(1, 64), [0], 0, 5)
    listed.top_ids[0, 4] = strange
    for sides in ((whole, listed), (listed, whole)):
        with pytest.raises(AccuracyError, match=f"token id {strange} is listed .* has 64 tokens"):
            pair(*sides)


def test_noise_is_that_of_two_normal_distributions():
    source = np.random.default_rng(0)
    base, test = source.normal(0, 1, (200, 1000)), source.normal(0, 1.5, (200, 1000))
    noise = sum(
        (Noise.of(torch.tensor(base[i::4]).float(), torch.tensor(test[i::4]).float()) for i in range(4)),
        Noise(),
    )
    assert noise.sigma_ratio == pytest.approx(np.sqrt((test**2).mean() / (base**2).mean()), rel=1e-5)
    assert noise.linf_ratio == pytest.approx(np.abs(test).max() / np.abs(base).max(), rel=1e-5)
    # Of normal distributions: √(2 s t / (s² + t²)).
    assert noise.bhattacharyya == pytest.approx(np.sqrt(2 * 1.5 / (1 + 1.5**2)), abs=5e-3)
    same = Noise.of(torch.tensor(base).float(), torch.tensor(source.normal(0, 1, (200, 1000))).float())
    assert same.bhattacharyya > 0.999 and same.alike and not same.beyond_gates
    assert not noise.alike


def test_another_attention_of_the_same_weights_passes(reference, tmp_path):
    kit.saved(tmp_path, kit.tiny_llama(), kit.byte_tokenizer())
    eager = open_subject(f"transformers:{tmp_path}", {"attention": "eager"})
    outcome = validate_logits(eager, reference, PROMPTS, 8)
    assert outcome.passed
    assert outcome.data["limits"] == {FLOAT32.names[k]: limit for k, limit in FLOAT32.relative.items()}
    assert [len(row["forced"]["token"]) for row in outcome.data["prompts"]] == [8, 8, 8]
    assert outcome.data["prompts"][0]["tokens"] == list(
        reference.generate([PROMPTS[0]], 8, [kit_sampling()], 1)[0].tokens
    )
    json.dumps(outcome.to_json(), allow_nan=False)


def kit_sampling():
    from neuron_accuracy.subjects.protocol import Sampling

    return Sampling()


def test_one_scaled_row_of_weights_is_found(reference):
    outcome = validate_logits(changed(), reference, PROMPTS, 8)
    assert faults(outcome)[0][0] == "diverges"
    assert {where.split(",")[0] for _, where in faults(outcome)} == {"prompt 0", "prompt 1", "prompt 2"}
    assert [row["passed"] for row in outcome.data["prompts"]] == [False] * 3
    assert any(finding.kind == "other weights" for finding in outcome.findings)


def test_the_first_bad_token_says_where_to_look(reference):
    late = Edited(reference, lambda row: row + torch.linspace(0, 3, len(row)), (4, 5), own=False)
    outcome = validate_logits(late, reference, PROMPTS[:1], 8)
    assert faults(outcome) == [("diverges", "prompt 0, token 4")]
    assert "decode and the KV cache" in outcome.faults[0].detail
    early = Edited(reference, lambda row: row + torch.linspace(0, 3, len(row)), (0,), own=False)
    outcome = validate_logits(early, reference, PROMPTS[:1], 8)
    assert faults(outcome) == [("diverges", "prompt 0, token 0")]
    assert "look at prefill" in outcome.faults[0].detail


def test_a_fault_of_its_own_generation_only_is_found(reference):
    decode = Edited(reference, lambda row: row * 1.2, (3,), forced=False)
    outcome = validate_logits(decode, reference, PROMPTS[:2], 6)
    assert faults(outcome) == [("diverges", "prompt 0, token 3"), ("diverges", "prompt 1, token 3")]
    assert "only its own generation" in outcome.faults[0].detail


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_a_finding_on_either_side(reference, bad):
    def spoil(row):
        row[17] = bad
        return row

    spoiled = Edited(reference, spoil, (2,))
    outcome = validate_logits(spoiled, reference, PROMPTS[:1], 4)
    assert faults(outcome) == [("not finite", "prompt 0, token 2")]
    assert "test's side" in outcome.faults[0].detail
    outcome = validate_logits(reference, spoiled, PROMPTS[:1], 4)
    assert faults(outcome) == [("not finite", "prompt 0, token 2")]
    assert "reference's side" in outcome.faults[0].detail
    assert outcome.data["prompts"][0]["forced"]["token"] == [0, 1, 3]
    everywhere = Edited(reference, spoil, range(4))
    assert faults(validate_logits(everywhere, reference, PROMPTS[:1], 4))[0][0] == "not finite"


def test_three_way_excuses_the_dtype_and_nothing_worse(tmp_path, reference):
    kit.saved(tmp_path, kit.tiny_llama(), kit.byte_tokenizer())
    half = open_subject(f"transformers:{tmp_path}", {"dtype": "bfloat16"})
    other = open_subject(f"transformers:{tmp_path}", {"dtype": "bfloat16", "attention": "eager"})
    tight = Limits({k: limit / 20 for k, limit in HALF.relative.items()})
    assert not validate_logits(other, reference, PROMPTS, 8, limits=tight).passed
    outcome = validate_logits(other, half, PROMPTS, 8, baseline=reference, limits=tight)
    assert outcome.passed, outcome.findings
    assert outcome.data["mode"] == "three-way"
    assert outcome.data["sigma_ratio"] <= 1 or outcome.data["bhattacharyya"] >= 0.99
    wrong = kit.saved(tmp_path / "wrong", changed(1.5).model, kit.byte_tokenizer())
    broken = open_subject(f"transformers:{wrong}", {"dtype": "bfloat16"})
    outcome = validate_logits(broken, half, PROMPTS, 8, baseline=reference, limits=tight)
    assert faults(outcome) and outcome.data["sigma_ratio"] > 1 and outcome.data["bhattacharyya"] < 0.99
    assert any(finding.kind == "noisier than the dtype" for finding in outcome.findings)


def test_one_bad_prompt_among_good_ones_is_not_excused(tmp_path, reference):
    kit.saved(tmp_path, kit.tiny_llama(), kit.byte_tokenizer())
    half = open_subject(f"transformers:{tmp_path}", {"dtype": "bfloat16"})
    prompts = [[at, at + 1, at + 2] for at in range(3, 123)]

    class OneBad(Edited):
        def force(self, given, continuations, top):
            scores = self.inner.force(given, continuations, top)
            return [
                self._changed(item) if prompt == prompts[7] else item
                for prompt, item in zip(given, scores, strict=True)
            ]

    bad = OneBad(half, lambda row: row + torch.linspace(-2, 2, len(row)), (1,), own=False)
    outcome = validate_logits(bad, half, prompts, 4, baseline=reference)
    assert outcome.data["bhattacharyya"] >= 0.99
    assert [where for kind, where in faults(outcome) if kind == "diverges"] == ["prompt 7, token 1"]


def test_a_tie_is_a_note_and_another_choice_a_fault(reference):
    (made,) = reference.generate([PROMPTS[0]], 1, [kit_sampling()], 0)
    row = made.scores.logits[0]
    second = int(row.topk(2).indices[1])
    margin = float(row.topk(2).values.diff().abs())

    class Second(Edited):
        def generate(self, prompts, num_tokens, sampling, top):
            from neuron_accuracy.subjects.protocol import Generation

            made = self.inner.generate(prompts, num_tokens, sampling, top)
            return [Generation(item.prompt, (second, *item.tokens[1:]), item.scores) for item in made]

    other = Second(reference, lambda row: row, ())
    outcome = validate_logits(other, reference, PROMPTS[:1], 3)
    assert faults(outcome) == [("greedy divergence", "prompt 0, token 0")]
    assert outcome.faults[0].figures["margin"] == pytest.approx(margin, rel=1e-4)
    loose = Limits({5: 1.0})
    (note,) = validate_logits(other, reference, PROMPTS[:1], 3, limits=loose).findings
    assert (note.kind, note.severity) == ("tie", Severity.NOTE)


def test_a_server_is_held_against_the_model(reference, server):
    outcome = validate_logits(open_subject(f"server:{server.url}"), reference, PROMPTS, 5)
    assert outcome.passed, outcome.findings
    assert outcome.data["values"] == "logprobs"
    server.edit = lambda rows: rows * 1.3
    outcome = validate_logits(open_subject(f"server:{server.url}"), reference, PROMPTS, 5)
    assert faults(outcome)[0] == ("diverges", "prompt 0, token 0")


def test_two_servers(server):
    other = kit.TinyServer(kit.tiny_llama(), kit.byte_tokenizer())
    try:
        subjects = [open_subject(f"server:{one.url}") for one in (server, other)]
        assert validate_logits(*subjects, PROMPTS, 4).passed
        other.edit = lambda rows: rows.flip(-1)
        outcome = validate_logits(*subjects, PROMPTS, 4)
        assert {"diverges", "greedy divergence"} <= {kind for kind, _ in faults(outcome)}
    finally:
        other.close()


def test_what_cannot_be_compared_is_an_error(reference, server):
    shifted = TransformersSubject.of(kit.tiny_llama(), kit.byte_tokenizer(shift=1))
    with pytest.raises(AccuracyError, match="tokenizer is another"):
        validate_logits(shifted, reference, PROMPTS, 4)
    smaller = TransformersSubject.of(kit.tiny_llama(vocab_size=255))
    with pytest.raises(AccuracyError, match=r"255 tokens and the reference's 256"):
        validate_logits(smaller, reference, PROMPTS, 4)
    server.tokenizer = kit.byte_tokenizer(shift=1)
    with pytest.raises(AccuracyError, match="other tokenizers"):
        validate_logits(open_subject(f"server:{server.url}"), reference, PROMPTS, 4)
    for arguments in (([], 4), ([[]], 4), (PROMPTS, 0)):
        with pytest.raises(AccuracyError, match="works"):
            validate_logits(reference, reference, *arguments)
    with pytest.raises(AccuracyError, match="top=4"):
        validate_logits(reference, reference, PROMPTS, 4, top=4)


def test_prompts_are_encoded_alike_or_refused(reference, tmp_path):
    shifted = TransformersSubject.of(kit.tiny_llama(), kit.byte_tokenizer(shift=1))
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "abc", "task": "x"}\n\n{"token_ids": [1, 2]}\n')
    prompts = read_prompts(path)
    assert encode_prompts(prompts, reference) == [reference.encode("abc"), [1, 2]]
    with pytest.raises(AccuracyError, match="other tokenizers"):
        encode_prompts(prompts, reference, shifted)
    without = TransformersSubject.of(kit.tiny_llama())
    random = default_prompts(without, 5)
    assert random == default_prompts(without, 5) and all(prompt.token_ids for prompt in random)
    assert len({prompt.text for prompt in default_prompts(reference, 40)}) == 40


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"text": ""}', '{"token_ids": []}', '{"token_ids": ["a"]}', ""]
)
def test_a_file_that_holds_no_prompts_is_an_error_with_its_line(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(AccuracyError, match=r"prompts\.jsonl"):
        read_prompts(path)


def test_limits_are_parsed():
    assert parse_limits("--limits", "5=0.01, all=0.2").relative == {5: 0.01, 0: 0.2}
    for text in ("5", "x=1", "5=y", "0=1", "5=-1"):
        with pytest.raises(ConfigError, match="works"):
            parse_limits("--limits", text)


def test_the_command_says_the_verdict(tmp_path):
    right = kit.saved(tmp_path / "right", kit.tiny_llama(), kit.byte_tokenizer())
    wrong = kit.saved(tmp_path / "wrong", changed().model, kit.byte_tokenizer())
    out = tmp_path / "out.json"
    common = ["logits", "--reference", f"transformers:{right}", "--num-prompts", "3", "--tokens", "4"]
    result = CliRunner().invoke(cli, [*common, "--test", f"transformers:{right}", "--json", str(out)])
    assert (result.exit_code, "passed" in result.output) == (0, True)
    assert json.loads(out.read_text())["passed"] is True
    result = CliRunner().invoke(cli, [*common, "--test", f"transformers:{wrong}", "--json", "-"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["findings"][0]["kind"] == "diverges"
    loose = ["--limits", "all=1", "--option", "test.attention=eager"]
    result = CliRunner().invoke(cli, [*common, "--test", f"transformers:{wrong}", *loose])
    assert result.exit_code == 0
    for option in ("test.dtype", "dtype=x", "tset.dtype=x"):
        result = CliRunner().invoke(cli, [*common, "--test", f"transformers:{right}", "--option", option])
        assert isinstance(result.exception, ConfigError)
