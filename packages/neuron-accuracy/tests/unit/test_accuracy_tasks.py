# SPDX-License-Identifier: Apache-2.0
"""Tasks: likelihoods against the model's own, answers against its own text, thresholds and what is missing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from scipy import stats

from neuron_accuracy.cli.main import cli
from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Outcome
from neuron_accuracy.logits.prompts import read_prompts
from neuron_accuracy.subjects.open import open_subject
from neuron_accuracy.subjects.protocol import Sampling
from neuron_accuracy.subjects.transformers import TransformersSubject
from neuron_accuracy.tasks import evaluate as evaluation
from neuron_accuracy.tasks.catalog import TASKS, task_infos
from neuron_accuracy.tasks.check import check_tasks, sign_test
from neuron_accuracy.tasks.data.arithmetic_items import items
from neuron_accuracy.tasks.evaluate import Sample, Scored, TaskScores, evaluate, local_completions
from neuron_accuracy.tasks.thresholds import Threshold, metric_named, read_thresholds

_SPEC = importlib.util.spec_from_file_location("accuracy_kit", Path(__file__).parents[1] / "accuracy_kit.py")
kit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kit)

DATA = Path(evaluation.__file__).parent / "data"


@pytest.fixture(scope="module")
def subject():
    return TransformersSubject.of(kit.tiny_llama(max_position_embeddings=512), kit.byte_tokenizer())


@pytest.fixture(scope="module")
def other():
    return TransformersSubject.of(kit.tiny_llama(seed=5, max_position_embeddings=512), kit.byte_tokenizer())


@pytest.fixture(scope="module")
def lm(subject):
    from neuron_accuracy.tasks.model import SubjectLM

    return SubjectLM(subject)


@pytest.fixture
def server_asked(subject):
    server = kit.TinyServer(subject.model, subject.tokenizer)
    yield server
    server.close()


def likelihood(subject, before, text):
    """Log-likelihood of a text after another, by one pass of the model; and whether greedy would write it."""
    ids = subject.encode(before + text)
    begin = len(subject.encode(before))
    with torch.inference_mode():
        rows = subject.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    values = [float(rows[at - 1, ids[at]]) for at in range(begin, len(ids))]
    greedy = all(int(rows[at - 1].argmax()) == ids[at] for at in range(begin, len(ids)))
    return sum(values), greedy


def asks(*pairs):
    return [SimpleNamespace(args=pair) for pair in pairs]


def test_the_items_are_whole_and_made_by_their_script():
    lines = [json.loads(line) for line in (DATA / "arithmetic.jsonl").read_text().splitlines()]
    assert lines == list(items())
    assert all(eval(line["question"]) == int(line["answer"]) for line in lines)
    cloze = [json.loads(line) for line in (DATA / "cloze.jsonl").read_text().splitlines()]
    assert len(cloze) >= 60 and len({line["context"] for line in cloze}) == len(cloze)
    for line in cloze:
        assert len(set(line["choices"])) == 4 and 0 <= line["answer"] < 4
    places = [line["answer"] for line in cloze]
    assert min(places.count(at) for at in range(4)) >= len(cloze) // 8


def test_likelihoods_are_those_of_one_pass(subject, lm):
    pairs = [("Once upon", " a time"), ("One", " two"), ("x", "yz")]
    for (value, greedy), pair in zip(lm.loglikelihood(asks(*pairs), disable_tqdm=True), pairs, strict=True):
        expected, likely = likelihood(subject, *pair)
        assert value == pytest.approx(expected, rel=1e-5) and greedy == likely
    # A space at the end of a context belongs to what follows, as in training.
    assert lm.loglikelihood(asks(("One ", "two")), disable_tqdm=True) == [
        lm.loglikelihood(asks(("One", " two")), disable_tqdm=True)[0]
    ]
    letters = [chr(at) for at in range(97, 123)]
    made = subject.generate([subject.encode(letter) for letter in letters], 1, [Sampling()] * 26, 1)
    written = [(letter, item.tokens) for letter, item in zip(letters, made, strict=True)]
    letter, text = next(
        (letter, subject.decode(tokens))
        for letter, tokens in written
        if subject.encode(subject.decode(tokens)) == list(tokens)
    )
    assert [greedy for _, greedy in lm.loglikelihood(asks((letter, text)), disable_tqdm=True)] == [True]


def test_a_rolling_likelihood_is_that_of_its_windows(subject):
    from neuron_accuracy.tasks.model import SubjectLM

    text = "It was a dark and stormy night"
    end = subject.tokenizer.eos_token
    (value,) = SubjectLM(subject).loglikelihood_rolling(asks((text,)))
    assert value == pytest.approx(likelihood(subject, end, text)[0], rel=1e-5)
    (windows,) = SubjectLM(subject, max_length=8).loglikelihood_rolling(asks((text,)))
    assert windows != pytest.approx(value, rel=1e-3)


def test_answers_end_where_they_are_told(subject, lm):
    (made,) = subject.generate([subject.encode("Hello")], 40, [Sampling()], 1)
    tokens = list(made.tokens)
    ended = tokens[: tokens.index(1)] if 1 in tokens else tokens
    text = subject.decode(ended)
    whole = {"until": [], "max_gen_toks": 40, "do_sample": False}
    stop = text[11]
    (answer, cut, short) = lm.generate_until(
        asks(
            ("Hello", whole),
            ("Hello", {**whole, "until": [stop]}),
            ("Hello", {**whole, "max_gen_toks": 3}),
        )
    )
    assert answer == text
    assert cut == text[: text.index(stop)]
    assert short == subject.decode(ended[:3])
    with pytest.raises(AccuracyError, match="beams"):
        lm.generate_until(asks(("Hello", {"beams": 3})))


def test_an_end_of_text_at_any_place_ends_an_answer(subject):
    from neuron_accuracy.subjects.protocol import Generation
    from neuron_accuracy.tasks.model import SubjectLM

    class Scripted:
        tokenizer = subject.tokenizer
        encode, decode, info = subject.encode, subject.decode, subject.info

        def __init__(self, at):
            self.at = at

        def generate(self, prompts, num_tokens, sampling, top):
            begin = len(prompts[0]) - len(subject.encode("ab"))
            drawn = tuple(1 if begin + at >= self.at else 50 for at in range(num_tokens))
            return [Generation(tuple(prompts[0]), drawn, None)]

    for at in (0, 1, 7, 8, 9, 16):
        (answer,) = SubjectLM(Scripted(at)).generate_until(asks(("ab", {"max_gen_toks": 64})))
        assert answer == subject.decode([50] * at)


def test_scores_are_counted_from_the_models_own_likelihoods(subject):
    (scores,) = evaluate(subject, task_infos(["cloze"]), limit=12)
    lines = [json.loads(line) for line in (DATA / "cloze.jsonl").read_text().splitlines()][:12]
    right = []
    for line in lines:
        # By letter, so that short words are not favoured.
        values = [
            likelihood(subject, line["context"], f" {choice}")[0] / len(choice) for choice in line["choices"]
        ]
        right.append(values.index(max(values)) == line["answer"])
    assert [sample.right for sample in scores.samples] == right
    assert scores.metrics["acc_norm,none"].value == pytest.approx(sum(right) / 12)
    assert scores.samples[0].target == " " + lines[0]["choices"][lines[0]["answer"]]


def test_a_server_scores_as_its_model_by_either_client(subject, tmp_path):
    server = kit.TinyServer(subject.model, subject.tokenizer)
    try:
        opened = open_subject(f"server:{server.url}")
        (ours,) = evaluate(subject, task_infos(["cloze"]), limit=4)
        (theirs,) = evaluate(opened, task_infos(["cloze"]), limit=4)
        assert [sample.answer for sample in ours.samples] == [sample.answer for sample in theirs.samples]
        before = server.completions
        subject.tokenizer.save_pretrained(tmp_path)
        client = local_completions(f"{server.url}/v1", "tiny", str(tmp_path), opened.authorization)
        assert client.header == {"Authorization": opened.authorization}
        (asked,) = evaluate(client, task_infos(["cloze"]), limit=4)
        assert [sample.answer for sample in ours.samples] == [sample.answer for sample in asked.samples]
        assert server.completions > before
    finally:
        server.close()


def test_deviating_samples_are_prompts_to_look_at(subject, other, tmp_path):
    outcome = check_tasks(subject, ["cloze"], reference=other, limit=20)
    (row,) = outcome.data["tasks"]
    assert len(outcome.data["deviating"]) > 0
    for item in outcome.data["deviating"]:
        assert item["answer"] != item["target"] == item["reference_answer"]
        assert item["token_ids"] == subject.encode(item["text"])
    (same,) = check_tasks(subject, ["cloze"], reference=subject, limit=20).data["tasks"]
    assert same["right"] == same["reference_right"] == row["right"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(item) for item in outcome.data["deviating"]))
    assert len(read_prompts(path)) == len(outcome.data["deviating"])


def scored(name, rights, metrics=None):
    samples = [Sample(f"{name}/{at}", "p", "t", "a", right) for at, right in enumerate(rights)]
    return TaskScores(name, metrics or {"acc,none": Scored(0.5, 0.05)}, samples, 1.0)


def stub(monkeypatch, *results):
    given = list(results)
    monkeypatch.setattr("neuron_accuracy.tasks.check.evaluate", lambda *a, **k: [given.pop(0)])


@pytest.mark.parametrize(
    ("minimum", "kind", "passed"),
    [(0.5, None, True), (0.59, "near threshold", True), (0.61, "below threshold", False)],
)
def test_a_threshold_allows_for_the_standard_error(monkeypatch, subject, minimum, kind, passed):
    stub(monkeypatch, scored("cloze", [True, False]))
    outcome = check_tasks(subject, ["cloze"], thresholds=[Threshold("cloze", "acc", minimum)])
    assert outcome.passed == passed
    assert [finding.kind for finding in outcome.findings] == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("lost", "won", "passed"), [(12, 0, False), (9, 0, True), (20, 12, True), (0, 9, True)]
)
def test_worse_than_the_reference_is_told_by_an_exact_test(monkeypatch, subject, lost, won, passed):
    ours = [False] * lost + [True] * won + [True] * 30
    theirs = [True] * lost + [False] * won + [True] * 30
    stub(monkeypatch, scored("cloze", ours), scored("cloze", theirs))
    outcome = check_tasks(subject, ["cloze"], reference=subject)
    assert outcome.passed == passed
    chance = stats.binomtest(lost, lost + won, alternative="greater").pvalue
    assert sign_test(lost, won) == pytest.approx(chance)
    assert (chance <= 1e-3) != passed
    assert len(outcome.data["deviating"]) == lost


def test_thresholds_are_read_or_refused_by_name(tmp_path, subject):
    path = tmp_path / "least.toml"
    path.write_text('cloze.acc = 0.5\n[arithmetic]\n"exact_match,number" = 1\n')
    assert read_thresholds(path) == [
        Threshold("cloze", "acc", 0.5),
        Threshold("arithmetic", "exact_match,number", 1.0),
    ]
    for text in ("", "cloze = 0.5", 'cloze.acc = "high"', "cloze.acc ="):
        path.write_text(text)
        with pytest.raises(AccuracyError, match=r"least\.toml"):
            read_thresholds(path)
    with pytest.raises(AccuracyError, match=r"clozes\.acc.*did you mean 'cloze'"):
        check_tasks(subject, ["cloze"], thresholds=[Threshold("clozes", "acc", 0.5)])


def test_a_task_without_a_threshold_beside_one_with_is_noted(monkeypatch, subject):
    scores = [scored("cloze", [True]), scored("arithmetic", [True])]
    monkeypatch.setattr("neuron_accuracy.tasks.check.evaluate", lambda *a, **k: scores)
    outcome = check_tasks(subject, ["cloze", "arithmetic"], thresholds=[Threshold("cloze", "acc", 0.4)])
    assert [(finding.kind, finding.where) for finding in outcome.findings] == [("no threshold", "arithmetic")]
    assert outcome.passed and outcome.verdict == "passed"


def test_the_clients_of_a_server_share_its_address_and_key(server_asked, monkeypatch):
    """lm-eval's own is told what the subject found out: the folder of the API, and the key."""
    given = []
    monkeypatch.setattr("neuron_accuracy.cli.tasks.local_completions", lambda *args: given.append(args))
    monkeypatch.setattr(
        "neuron_accuracy.cli.tasks.check_tasks",
        lambda *a, **k: Outcome("tasks", "", "", "", (), {"tasks": []}),
    )
    arguments = ["tasks", "--test", f"server:{server_asked.url}", "--client", "local-completions"]
    result = CliRunner().invoke(cli, [*arguments, "--option", "test.api_key=hush"], catch_exceptions=False)
    assert result.exit_code == 0
    assert given == [(f"{server_asked.url}/v1", "tiny", "", "Bearer hush")]


def test_a_metric_that_is_missing_is_an_error(monkeypatch, subject):
    scores = scored("cloze", [True], {"acc,none": Scored(1.0, 0.0), "acc,other": Scored(1.0, 0.0)})
    assert metric_named(scores, "acc,none") == "acc,none"
    with pytest.raises(AccuracyError, match="any of"):
        metric_named(scores, "acc")
    with pytest.raises(AccuracyError, match="no metric 'acd'"):
        metric_named(scores, "acd")
    info = TASKS["cloze"]
    monkeypatch.setitem(TASKS, "cloze", type(info)("cloze", "f1,none", local=True))
    with pytest.raises(AccuracyError, match="no f1,none"):
        evaluate(subject, task_infos(["cloze"]), limit=2)


def test_tasks_that_are_not_here_say_so(subject, monkeypatch):
    with pytest.raises(AccuracyError, match="did you mean 'cloze'"):
        task_infos(["clozze"])
    for names in ([], ["cloze", "cloze"]):
        with pytest.raises(AccuracyError):
            task_infos(names)
    with pytest.raises(AccuracyError, match=r"gsm8k: its items.*cannot be had.*cloze, arithmetic need none"):
        evaluate(subject, task_infos(["gsm8k"]), limit=1)


def test_without_lm_eval_the_extra_is_named(subject, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(AccuracyError, match=r"neuron-accuracy\[tasks\]"):
        evaluate(subject, task_infos(["cloze"]), limit=2)


def test_the_command_writes_what_to_look_at(subject, tmp_path):
    folder = kit.saved(tmp_path / "model", subject.model, subject.tokenizer)
    least = tmp_path / "least.toml"
    least.write_text("cloze.acc_norm = 0.99\n")
    arguments = ["tasks", "--test", f"transformers:{folder}", "--tasks", "cloze", "--limit", "8"]
    out = tmp_path / "look.jsonl"
    result = CliRunner().invoke(
        cli, [*arguments, "--thresholds", str(least), "--deviating", str(out), "--json", "-"]
    )
    assert result.exit_code == 1, result.output
    data = json.loads(result.stdout)
    assert data["findings"][0]["kind"] == "below threshold"
    assert len(read_prompts(out)) == len(data["data"]["deviating"])
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    (right,) = (row["metrics"]["acc_norm,none"]["value"] for row in data["data"]["tasks"])
    assert f"{right:.4g}" in result.output and "against nothing" in result.output
    assert result.stdout.splitlines()[-1] == "nothing was compared", "scores pass nothing"
    result = CliRunner().invoke(cli, [*arguments, "--client", "local-completions"])
    assert "asks servers only" in str(result.exception)
