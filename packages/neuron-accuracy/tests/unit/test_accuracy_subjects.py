# SPDX-License-Identifier: Apache-2.0
"""Subjects: a model of transformers against its own forward pass, a server against the model it is made of."""

from __future__ import annotations

import base64
import importlib.util
import socket
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.errors import SubjectError
from neuron_accuracy.subjects.drawing import limited
from neuron_accuracy.subjects.open import open_subject
from neuron_accuracy.subjects.parallel import in_parallel
from neuron_accuracy.subjects.protocol import Sampling
from neuron_accuracy.subjects.transformers import TransformersSubject
from neuron_core.errors import ConfigError

_SPEC = importlib.util.spec_from_file_location("accuracy_kit", Path(__file__).parents[1] / "accuracy_kit.py")
kit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kit)

PROMPTS = [[5, 9, 100, 4], [77, 200, 31, 8, 60, 12]]


@pytest.fixture(scope="module")
def model():
    return kit.tiny_llama()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return kit.saved(tmp_path_factory.mktemp("tiny"), model, kit.byte_tokenizer())


@pytest.fixture
def server(model):
    server = kit.TinyServer(model, kit.byte_tokenizer())
    yield server
    server.close()


def rows(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def test_a_folder_is_opened_with_its_options_and_described(folder, model):
    subject = open_subject(f"transformers:{folder}", {"dtype": "bfloat16"})
    info = subject.info()
    assert (info.dtype, info.vocab_size, info.model) == ("bfloat16", kit.VOCAB, str(folder))
    assert subject.model.dtype == torch.bfloat16
    assert subject.decode(subject.encode("Hello there")) == "Hello there"
    assert info.revision == open_subject(f"transformers:{folder}").info().revision
    subject.close()
    with pytest.raises(SubjectError, match="closed"):
        subject.force([[1]], [[2]], 0)


def test_a_changed_weight_is_another_revision(folder, model, tmp_path):
    other = kit.tiny_llama()
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[3] *= 1.02
    changed = kit.saved(tmp_path, other, kit.byte_tokenizer())
    one, two = (open_subject(f"transformers:{path}").info() for path in (folder, changed))
    assert one.revision != two.revision and one.tokenizer == two.tokenizer


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("transfomers:x", {}, "did you mean 'transformers'"),
        ("no-colon", {}, "KIND:MODEL"),
        ("transformers:/no/such/folder", {}, "no such folder"),
        ("server:localhost", {}, "http://localhost:8000/v1 works"),
    ],
)
def test_what_cannot_be_opened_says_why(text, options, said):
    with pytest.raises(SubjectError, match=said):
        open_subject(text, options)


def test_a_kind_of_another_distribution_is_opened(monkeypatch):
    one = EntryPoint("mine", f"{__name__}:contributed", "neuron_accuracy.subjects")
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda model, options: (model, dict(options)))
    for points, kind in (([one], "mine"), ([one, one], "twice"), ([replace_name(one, "server")], "built in")):
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group, points=points: points)
        if kind == "mine":
            assert open_subject("mine:a:b", {"x": 1}) == ("a:b", {"x": 1})
        else:
            with pytest.raises(SubjectError, match=r"one distribution|built in"):
                open_subject("mine:a")


def replace_name(point, name):
    return EntryPoint(name, point.value, point.group)


def test_an_option_that_is_none_names_the_nearest(folder):
    with pytest.raises(ConfigError, match="did you mean 'dtype'"):
        open_subject(f"transformers:{folder}", {"dtyp": "bfloat16"})
    with pytest.raises(ConfigError, match="float32"):
        open_subject(f"transformers:{folder}", {"dtype": "float23"})


def test_forcing_gives_the_rows_before_each_token(model):
    subject = TransformersSubject.of(model)
    scores = subject.force(PROMPTS, [[1, 2, 3], [4, 5]], 0)
    for prompt, tokens, item in zip(PROMPTS, [[1, 2, 3], [4, 5]], scores, strict=True):
        whole = rows(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        torch.testing.assert_close(item.logits, whole)
        expected = [float(whole[at].log_softmax(-1)[token]) for at, token in enumerate(tokens)]
        assert item.chosen_logprobs.tolist() == pytest.approx(expected, abs=1e-5)
        assert item.begin == len(prompt)


def test_a_greedy_generation_is_the_argmax_of_whole_passes(model):
    (made,) = TransformersSubject.of(model).generate([PROMPTS[0]], 6, [Sampling()], 5)
    tokens = list(PROMPTS[0])
    for at in range(6):
        row = rows(model, tokens)[-1]
        assert made.scores.top_ids[at].tolist() == row.topk(5).indices.tolist()
        tokens.append(int(row.argmax()))
    assert list(made.tokens) == tokens[len(PROMPTS[0]) :]
    assert made.scores.logits is None


def test_a_seed_decides_a_draw_and_limits_hold(model):
    subject = TransformersSubject.of(model)
    how = [Sampling(temperature=1.0, top_k=3, seed=seed) for seed in (1, 1, *range(2, 40))]
    drawn = [made.tokens[0] for made in subject.generate([PROMPTS[0]] * len(how), 1, how, 1)]
    assert drawn[0] == drawn[1]
    best = set(rows(model, PROMPTS[0])[-1].topk(3).indices.tolist())
    assert set(drawn) <= best and len(set(drawn)) > 1


def test_limits_are_applied_as_written_out_by_hand():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert limited(logits, Sampling(temperature=1.0, top_p=0.6)).tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0, 0]
    )
    assert limited(logits, Sampling(temperature=1.0, min_p=0.25)).tolist() == pytest.approx(
        [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]
    )
    halved = torch.tensor([0.25, 0.0625, 0.0225, 0.01])
    assert limited(logits, Sampling(temperature=0.5)).tolist() == pytest.approx(
        (halved / halved.sum()).tolist()
    )
    assert limited(logits, Sampling(temperature=1.0, top_k=1)).tolist() == [1, 0, 0, 0]


def test_a_model_without_a_tokenizer_takes_ids_of_its_vocabulary_only(model):
    subject = TransformersSubject.of(model)
    with pytest.raises(SubjectError, match="no tokenizer"):
        subject.encode("Hello")
    with pytest.raises(SubjectError, match="256"):
        subject.generate([[256]], 1, [Sampling()], 1)
    with pytest.raises(SubjectError, match="no tokens"):
        subject.force([[]], [[1]], 0)


def test_a_capture_has_rows_of_each_sequence_and_its_cache(model, tmp_path):
    subject = TransformersSubject.of(model)
    spec = CaptureSpec(modules=("model.layers.*.mlp",), kv=True)
    subject.capture(PROMPTS, [[1, 2], [3, 4]], spec, tmp_path / "capture")
    taken = {}
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *call: taken.update(out=call[2]))
    cache = model(torch.tensor([[*PROMPTS[1], 3]]), use_cache=True).past_key_values
    hook.remove()
    folder = tmp_path / "capture" / "dp0"
    (path,) = folder.glob("prefill_s7_1/model.layers.1.mlp/rank0.safetensors")
    torch.testing.assert_close(load_file(path)["output.0"], taken["out"][0].detach())
    (pages,) = folder.glob("kv/request-1/layer.0/rank0.safetensors")
    layer = cache.layers[0]
    expected = torch.cat([layer.keys, layer.values], dim=-1).detach()
    torch.testing.assert_close(load_file(pages)["pages"], expected)


@pytest.mark.parametrize("way", ["prompt_logprobs", "echo", "steps"])
def test_a_server_scores_given_tokens_whichever_way_it_offers(model, server, way):
    keep = {"logprobs", "token_ids", "ids"} | ({way} if way != "steps" else set())
    server.offers = set(keep)
    subject = open_subject(f"server:{server.url}")
    scores = subject.force(PROMPTS, [[1, 2, 3], [4, 5, 6]], 8)
    for prompt, tokens, item in zip(PROMPTS, [[1, 2, 3], [4, 5, 6]], scores, strict=True):
        whole = rows(model, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        values, ids = whole.topk(8)
        torch.testing.assert_close(item.top_ids, ids)
        torch.testing.assert_close(item.top_logprobs, values)
        if way != "steps":
            expected = [float(whole[at, token]) for at, token in enumerate(tokens)]
            assert item.chosen_logprobs.tolist() == pytest.approx(expected, abs=1e-5)
    subject.close()


def test_a_server_generates_as_its_model_does(model, server):
    subject = open_subject(f"server:{server.url}/v1", {"concurrency": "2"})
    how = [Sampling(), Sampling()]
    theirs = subject.generate(PROMPTS, 5, how, 6)
    for ours, item in zip(TransformersSubject.of(model).generate(PROMPTS, 5, how, 6), theirs, strict=True):
        assert ours.tokens == item.tokens
        torch.testing.assert_close(ours.scores.top_logprobs, item.scores.top_logprobs)
    assert subject.decode(subject.encode("abc")) == "abc"


def test_tokens_named_by_text_need_a_tokenizer(folder, server):
    server.offers -= {"token_ids"}
    with pytest.raises(SubjectError, match="return_tokens_as_token_ids"):
        open_subject(f"server:{server.url}").generate([PROMPTS[0]], 2, [Sampling()], 5)


@pytest.mark.parametrize(
    ("missing", "said"),
    [("logprobs", "without log-probabilities"), ("ids", "4 token ids: .*prompt must be a string")],
)
def test_a_server_that_lacks_something_is_an_error_that_names_it(server, missing, said):
    server.offers -= {missing, "prompt_logprobs", "echo"}
    subject = open_subject(f"server:{server.url}")
    with pytest.raises(SubjectError, match=said) as raised:
        subject.generate([PROMPTS[0]], 2, [Sampling()], 5)
    assert server.url in str(raised.value)
    with pytest.raises(SubjectError, match=said):
        subject.force([PROMPTS[0][:3]], [[1]], 5) if missing == "logprobs" else subject.force(
            [PROMPTS[0]], [[1]], 5
        )


def test_a_server_that_gives_fewer_log_probabilities_is_an_error(server):
    server.most = 3
    with pytest.raises(
        SubjectError, match=r"gives 4 log-probabilities, .* where 20 were asked for; ask for 3"
    ):
        open_subject(f"server:{server.url}").force([PROMPTS[0]], [[1, 2]], 20)


def test_a_server_that_ends_early_or_reads_other_tokens_is_an_error(server):
    server.ends_after = 3
    with pytest.raises(SubjectError, match="drew 3 tokens where 5 were asked for"):
        open_subject(f"server:{server.url}").generate([PROMPTS[0]], 5, [Sampling()], 5)
    server.reads = 1
    with pytest.raises(SubjectError, match="read 6 tokens where a prompt of 5"):
        open_subject(f"server:{server.url}").force([PROMPTS[0]], [[1]], 5)


@pytest.mark.parametrize("status", [404, 500])
def test_a_status_is_told_with_what_the_server_said(server, status):
    subject = open_subject(f"server:{server.url}", {"retries": "0"})
    server.status = status
    with pytest.raises(SubjectError, match=f"HTTP {status} .*told to refuse"):
        subject.generate([PROMPTS[0]], 1, [Sampling()], 5)


@pytest.mark.parametrize(
    ("userinfo", "options", "sent"),
    [
        ("", {}, "Bearer of-the-environment"),
        ("", {"api_key": "given"}, "Bearer given"),
        ("me:p%40ss@", {}, "Basic " + base64.b64encode(b"me:p@ss").decode()),
    ],
)
def test_a_key_or_a_password_is_sent_and_told_nowhere(server, monkeypatch, userinfo, options, sent):
    seen = []
    handler = server._http.RequestHandlerClass
    send = handler._send
    monkeypatch.setattr(
        handler, "_send", lambda self, *a: seen.append(self.headers["Authorization"]) or send(self, *a)
    )
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    subject = open_subject(
        server.url.replace("http://", f"server:http://{userinfo}"), options | {"retries": 0}
    )
    assert subject.encode("a") and seen == [sent] * 2
    assert subject.url == f"{server.url}/v1"
    server.status = 500
    with pytest.raises(SubjectError) as raised:
        subject.generate([PROMPTS[0]], 1, [Sampling()], 5)
    assert server.url in str(raised.value) and "p%40ss" not in str(raised.value)


@pytest.mark.parametrize("address", ["me:hush@host/v1", "ftp://me:hush@host", "http://me:hush@[::1/v1"])
def test_an_address_that_is_none_is_told_without_its_password(address):
    with pytest.raises(SubjectError, match="http://localhost:8000/v1 works") as raised:
        open_subject(f"server:{address}")
    assert "hush" not in str(raised.value)


def test_what_is_done_in_parallel_is_in_order_and_its_first_error_ends_it():
    assert in_parallel(lambda x: x * x, range(20), 3) == [x * x for x in range(20)]
    assert in_parallel(str, [], 3) == []
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        time.sleep(0.02)
        if item == 1:
            raise SubjectError("of item 1")
        return item

    with pytest.raises(SubjectError, match="of item 1"):
        in_parallel(work, range(100), 2)
    time.sleep(0.2)
    assert len(begun) < 10


def test_python_ends_without_waiting_for_a_request_in_flight():
    script = "import sys, threading, time; from neuron_accuracy.subjects.parallel import in_parallel\n"
    script += "def work(item):\n    if item: raise KeyboardInterrupt\n    time.sleep(60)\n"
    script += "try: in_parallel(work, [1, 0], 2)\nexcept KeyboardInterrupt: sys.exit(3)"
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == 3


def test_no_server_and_no_tokenizer_are_said(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(SubjectError, match="no server answers there"):
            open_subject(f"server:http://127.0.0.1:{free.getsockname()[1]}", {"retries": 0})
    server.offers -= {"tokenize"}
    subject = open_subject(f"server:{server.url}", {"retries": 0})
    with pytest.raises(SubjectError, match="tokenizer=DIR"):
        subject.encode("Hello")
    with pytest.raises(SubjectError, match="top=20"):
        subject.force([[1]], [[2]], 0)
    with pytest.raises(SubjectError, match="serves"):
        open_subject(f"server:{server.url}", {"model": "another"})
