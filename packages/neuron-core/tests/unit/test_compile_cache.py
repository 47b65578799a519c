# SPDX-License-Identifier: Apache-2.0
"""An entry is compiled once, loaded only if it is whole, and never half there."""

import errno
import json
import logging
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from neuron_core.errors import CacheError
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.key import GraphKey

KEY = GraphKey.of({"graph": "same"})
worker = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("cache_worker.py"))))


def compile_into(staging):
    (staging / "artifact.bin").write_bytes(b"artifact" * 1000)
    (staging / "graph.json").write_text("{}")
    return {"part": "test"}


def never(staging):
    raise AssertionError("compiled again")


def test_a_second_cache_finds_the_entry(tmp_path):
    entry, compiled = CompileCache(tmp_path).get_or_compile(KEY, compile_into)
    assert compiled and entry.manifest["components"] == {"graph": "same"} and entry.manifest["part"] == "test"
    again = CompileCache(tmp_path)
    entry, compiled = again.get_or_compile(KEY, never)
    assert not compiled and (entry.path / "artifact.bin").read_bytes() == b"artifact" * 1000
    assert (again.counters.hits, again.counters.misses, again.counters.bytes_read) == (1, 0, 8002)
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "extra", "manifest", "lie"])
def test_a_damaged_entry_is_counted_and_rebuilt(tmp_path, damage):
    entry, _ = CompileCache(tmp_path).get_or_compile(KEY, compile_into)
    file = entry.path / "artifact.bin"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[4321] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "remove":
        file.unlink()
    elif damage == "extra":
        (entry.path / "planted.so").write_bytes(b"x")
    elif damage == "manifest":
        (entry.path / "manifest.json").write_text("{")
    else:
        other = GraphKey.of({"graph": "other"})
        os.rename(entry.path, entry.path.with_name(other.digest))
        cache = CompileCache(tmp_path)
        assert cache.lookup(other.digest) is None and cache.counters.invalid == 1
        return
    cache = CompileCache(tmp_path)
    rebuilt, compiled = cache.get_or_compile(KEY, compile_into)
    assert compiled and cache.counters.invalid == 1
    assert (rebuilt.path / "artifact.bin").read_bytes() == b"artifact" * 1000
    assert CompileCache(tmp_path).lookup(KEY.digest) is not None


def test_an_entry_without_sentinel_does_not_exist(tmp_path):
    entry, _ = CompileCache(tmp_path).get_or_compile(KEY, compile_into)
    (entry.path / "COMPLETE").unlink()
    assert CompileCache(tmp_path).lookup(KEY.digest) is None


def test_a_failed_compile_leaves_nothing(tmp_path):
    def fail(staging):
        (staging / "artifact.bin").write_bytes(b"half")
        raise RuntimeError("no compiler")

    cache = CompileCache(tmp_path)
    with pytest.raises(RuntimeError, match="no compiler"):
        cache.get_or_compile(KEY, fail)
    assert cache.lookup(KEY.digest) is None and list((tmp_path / "staging").iterdir()) == []


def test_a_killed_compiles_folder_is_cleaned(tmp_path):
    log = tmp_path / "log"
    process = worker.start("ask", root=tmp_path / "cache", result=tmp_path / "r", log=log, seconds=600)
    worker.wait_for(log.exists)
    worker.kill(process)
    assert len(list((tmp_path / "cache" / "staging").iterdir())) == 1
    cache = CompileCache(tmp_path / "cache")
    assert list((tmp_path / "cache" / "staging").iterdir()) == []
    assert cache.lookup(KEY.digest) is None


def test_a_running_compiles_folder_is_left_alone(tmp_path):
    log, said = tmp_path / "log", tmp_path / "result"
    process = worker.start("ask", root=tmp_path / "cache", result=said, log=log, seconds=2)
    worker.wait_for(log.exists)
    CompileCache(tmp_path / "cache").prune(max_bytes=0, older_than_s=0)
    process.join(60)
    assert json.loads(said.read_text())["right"]


def test_a_root_that_cannot_be_made_falls_back_and_says_where(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        cache = CompileCache(blocked / "cache")
    assert str(blocked / "cache") in caplog.text
    entry, compiled = cache.get_or_compile(KEY, compile_into)
    assert compiled and not entry.path.is_relative_to(blocked)
    assert not cache.get_or_compile(KEY, never)[1]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_fills_up_falls_back_and_keeps_what_it_has(tmp_path, caplog, code):
    old = GraphKey.of({"graph": "old"})
    cache = CompileCache(tmp_path)
    cache.get_or_compile(old, compile_into)
    places = []

    def full_once(staging):
        places.append(staging)
        if staging.is_relative_to(tmp_path):
            raise OSError(code, os.strerror(code))
        return compile_into(staging)

    with caplog.at_level(logging.WARNING):
        entry, compiled = cache.get_or_compile(KEY, full_once)
    assert compiled and len(places) == 2 and not entry.path.is_relative_to(tmp_path)
    assert str(tmp_path) in caplog.text
    assert not cache.get_or_compile(old, never)[1]


def test_no_place_at_all_is_an_error_naming_the_path(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(blocked / "temporary"))
    with pytest.raises(CacheError, match=str(blocked)):
        CompileCache(blocked / "cache")


def test_requests_are_remembered_and_a_damaged_one_is_forgotten(tmp_path):
    cache = CompileCache(tmp_path)
    cache.put_request("abc", {"shape": [1, 2]})
    assert CompileCache(tmp_path).get_request("abc") == {"shape": [1, 2]}
    assert cache.get_request("other") is None
    file = tmp_path / "requests" / "abc.json"
    file.write_text(file.read_text().replace("2", "3"))
    assert cache.get_request("abc") is None


def test_differences_of_keys_name_components():
    one = GraphKey.of({"graph": "a", "target": "x", "flags": "f"})
    two = GraphKey.of({"graph": "b", "target": "x"})
    assert one.differences(two) == ("flags", "graph") and one.differences(one) == ()
    assert one.digest != two.digest
