# SPDX-License-Identifier: Apache-2.0
"""The golden cache: what is kept, what makes it another entry, and damage."""

from __future__ import annotations

import importlib.util
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.logits.golden import GoldenCache, GoldenKey
from neuron_accuracy.logits.validate import validate_logits
from neuron_accuracy.subjects.open import open_subject
from neuron_accuracy.subjects.protocol import Sampling
from neuron_accuracy.subjects.transformers import TransformersSubject

_SPEC = importlib.util.spec_from_file_location("accuracy_kit", Path(__file__).parents[1] / "accuracy_kit.py")
kit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kit)

PROMPTS = [[5, 9, 100, 4], [77, 200, 31, 8]]


@pytest.fixture(scope="module")
def subject():
    return TransformersSubject.of(kit.tiny_llama())


@pytest.fixture(params=["directory", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "golden") if request.param == "directory" else f"memory://golden-{uuid.uuid4().hex}"


def key_of(subject, **changes):
    return replace(GoldenKey(subject.info(), PROMPTS, 3, 0), **changes)


def made_by(subject, top=0):
    return lambda: subject.generate(PROMPTS, 3, [Sampling()] * 2, top)


def forbidden():
    raise AssertionError("made again")


@pytest.mark.parametrize("top", [0, 7])
def test_what_is_kept_comes_back_to_the_bit(subject, url, top):
    key = key_of(subject, top=top)
    first = GoldenCache(url).get(key, made_by(subject, top))
    again = GoldenCache(url).get(key, forbidden)
    for one, two in zip(first, again, strict=True):
        assert (one.prompt, one.tokens, one.scores.begin) == (two.prompt, two.tokens, two.scores.begin)
        for name in ("chosen_logprobs", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(one.scores, name), getattr(two.scores, name))
        assert (two.scores.logits is None) == (top > 0)
        assert top or torch.equal(one.scores.logits, two.scores.logits)


def test_what_scores_depend_on_makes_another_entry(subject, tmp_path):
    cache = GoldenCache(str(tmp_path))
    cache.get(key_of(subject), made_by(subject))
    info = subject.info()
    others = [
        {"num_tokens": 4},
        {"prompts": [PROMPTS[0], [77, 200, 31, 9]]},
        {"top": 5},
        {"continuations": [[1, 2, 3], [4, 5, 6]]},
        {"info": replace(info, revision="other")},
        {"info": replace(info, dtype="bfloat16")},
        {"info": replace(info, cache_dtype="float8_e4m3fn")},
        {"info": replace(info, model="other")},
    ]
    for change in others:
        with pytest.raises(AssertionError, match="made again"):
            cache.get(key_of(subject, **change), forbidden)
    for same in (
        {"info": replace(info, parallel={"tp": 2})},
        {"info": replace(info, model=f"/elsewhere/{info.model}")},
    ):
        cache.get(key_of(subject, **same), forbidden)


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "no json"])
def test_a_damaged_entry_is_told_and_made_again(subject, tmp_path, how):
    cache = GoldenCache(str(tmp_path))
    right = cache.get(key_of(subject), made_by(subject))
    (tensors,), (about,) = tmp_path.glob("*.safetensors"), tmp_path.glob("*.json")
    data = bytearray(tensors.read_bytes())
    data[-5] ^= 1
    damage = {
        "flipped": lambda: tensors.write_bytes(data),
        "cut": lambda: tensors.write_bytes(data[: len(data) // 2]),
        "gone": tensors.unlink,
        "no json": lambda: about.write_text("{"),
    }
    damage[how]()
    outcome = validate_logits(subject, subject, PROMPTS, 3, golden=GoldenCache(str(tmp_path / "other")))
    assert outcome.passed
    again = GoldenCache(str(tmp_path))
    made = again.get(key_of(subject), made_by(subject))
    assert len(again.damaged) == 1 and about.stem in again.damaged[0]
    assert torch.equal(made[0].scores.logits, right[0].scores.logits)
    assert not list(tmp_path.glob(".*"))
    GoldenCache(str(tmp_path)).get(key_of(subject), forbidden)


def test_a_validation_runs_the_reference_once_and_tells_of_damage(subject, tmp_path):
    url = str(tmp_path / "golden")
    first = validate_logits(subject, subject, PROMPTS, 3, golden=GoldenCache(url))
    assert first.data["golden"] == {"hits": 0, "misses": 1}

    class Idle(TransformersSubject):
        def force(self, *args):
            raise AssertionError("the reference ran")

    idle = Idle(lambda: None, None, subject.info())
    second = validate_logits(subject, idle, PROMPTS, 3, golden=GoldenCache(url))
    assert second.passed and second.data["golden"] == {"hits": 1, "misses": 0}
    assert second.data["prompts"] == first.data["prompts"]
    (tensors,) = Path(url).glob("*.safetensors")
    tensors.write_bytes(b"nothing")
    third = validate_logits(subject, subject, PROMPTS, 3, golden=GoldenCache(url))
    assert [finding.kind for finding in third.findings] == ["golden damaged"] and third.passed
    assert third.data["golden"] == {"hits": 0, "misses": 1}


def test_what_cannot_be_kept_is_an_error(subject, tmp_path):
    server = kit.TinyServer(kit.tiny_llama(), kit.byte_tokenizer())
    try:
        with pytest.raises(AccuracyError, match="which weights"):
            validate_logits(
                subject, open_subject(f"server:{server.url}"), PROMPTS, 3, golden=GoldenCache(str(tmp_path))
            )
    finally:
        server.close()
    with pytest.raises(AccuracyError, match="a directory works"):
        GoldenCache("nosuchprotocol://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(AccuracyError, match="can be written"):
        GoldenCache(str(tmp_path / "file")).get(key_of(subject), forbidden)


class Refusing(MemoryFileSystem):
    """A store whose library has exceptions of its own, as botocore, aiohttp and requests do."""

    protocol = "refusing"
    at = "exists"

    class Refused(Exception):
        pass

    def exists(self, path, **kwargs):
        return self.refuse("exists") or super().exists(path, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        self.refuse("pipe_file")
        super().pipe_file(path, value, **kwargs)

    def mv(self, path1, path2, **kwargs):
        self.refuse("mv")
        super().mv(path1, path2, **kwargs)

    def refuse(self, at):
        if self.at == at:
            raise self.Refused("no credentials")


@pytest.mark.parametrize("at", ["exists", "pipe_file", "mv"])
def test_a_store_that_refuses_is_an_error_before_anything_is_made(subject, monkeypatch, at):
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    monkeypatch.setattr(Refusing, "at", at)
    make = made_by(subject) if at == "mv" else forbidden
    with pytest.raises(AccuracyError, match="refusing://x: no credentials; a directory"):
        GoldenCache("refusing://x").get(key_of(subject), make)


@pytest.mark.parametrize("url", ["", "zip:///tmp", "data:x"])
def test_an_address_that_cannot_be_written_is_an_error(subject, url):
    with pytest.raises(AccuracyError, match=r"golden cache.* works"):
        GoldenCache(url).get(key_of(subject), forbidden)


def test_what_making_raises_is_not_the_caches_error(subject, tmp_path):
    def broken():
        raise ValueError("the reference is broken")

    with pytest.raises(ValueError, match="the reference is broken"):
        GoldenCache(str(tmp_path)).get(key_of(subject), broken)
    assert not list(tmp_path.iterdir())
