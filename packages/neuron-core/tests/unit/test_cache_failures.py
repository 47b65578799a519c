# SPDX-License-Identifier: Apache-2.0
"""A compile that failed is not repeated at every start, and is repeated as soon as that may help."""

import errno
import json
import os
import runpy
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from neuron_core.errors import CacheError, CompileError, NotCompiledError
from neuron_core.graphs.cache import CompileCache, RecordedFailure
from neuron_core.graphs.key import GraphKey

worker = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("cache_worker.py"))))
KEY = worker.key()
FACTS = {"compiler": "inductor", "version": "2.13", "flags": {"-O": "2"}}


def never(staging):
    raise AssertionError("compiled again")


def fail(staging):
    (staging / "half.bin").write_bytes(b"half")
    raise CompileError("decode_b4 layer.0: register allocation failed")


def failed_cache(root):
    cache = CompileCache(root)
    with pytest.raises(CompileError, match="register allocation") as raised:
        cache.get_or_compile(KEY, fail, facts=FACTS)
    assert not isinstance(raised.value, RecordedFailure)
    return cache


def test_a_failure_is_recorded_and_raised_without_compiling(tmp_path):
    before = time.time()
    cache = failed_cache(tmp_path)
    assert cache.counters.failures_recorded == 1 and list((tmp_path / "staging").iterdir()) == []
    again = CompileCache(tmp_path)
    with pytest.raises(RecordedFailure) as raised:
        again.get_or_compile(KEY, never)
    log = tmp_path / "failures" / KEY.digest / "log.txt"
    for told in ("decode_b4 layer.0: register allocation failed", str(log), "VLLM_NEURON_RETRY_FAILED=1"):
        assert told in str(raised.value)
    assert isinstance(raised.value, CompileError)
    (failure,) = again.failures()
    assert failure == raised.value.failure and failure.digest == KEY.digest and failure.log == log
    assert failure.facts == {**FACTS, "components": {"graph": "same"}}
    assert before <= failure.created_s <= time.time()
    text = log.read_text()
    assert "compiler: inductor" in text and "in fail" in text and "CompileError: decode_b4" in text
    assert (again.counters.misses, again.counters.failures_recorded) == (0, 0)


def test_the_log_has_what_the_compiler_printed(tmp_path):
    def compile_into(staging):
        try:
            program = "import sys; print('to stdout'); sys.exit('to stderr')"
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        except subprocess.CalledProcessError as error:
            failure = CompileError("the compiler ended with status 1")
            failure.log = "line 7 of the vendor's log"
            raise failure from error

    with pytest.raises(CompileError):
        CompileCache(tmp_path).get_or_compile(KEY, compile_into)
    (failure,) = CompileCache(tmp_path).failures()
    text = failure.log.read_text()
    assert all(line in text for line in ("to stdout", "to stderr", "line 7 of the vendor's log"))


def test_it_is_tried_again_on_request_and_forgotten_after_success(tmp_path):
    cache = failed_cache(tmp_path)
    (first,) = cache.failures()
    with pytest.raises(CompileError, match="register allocation") as raised:
        CompileCache(tmp_path).get_or_compile(KEY, fail, retry_failed=True)
    assert not isinstance(raised.value, RecordedFailure)
    (second,) = cache.failures()
    assert second.created_s > first.created_s
    entry, compiled = cache.get_or_compile(KEY, worker.compile_into, retry_failed=True)
    assert compiled and worker.read_all(entry) == worker.CONTENT and cache.failures() == []
    assert list((tmp_path / "failures").iterdir()) == []
    entry, compiled = CompileCache(tmp_path).get_or_compile(KEY, never)
    assert not compiled


def test_changed_flags_are_another_key_and_are_tried(tmp_path):
    cache = failed_cache(tmp_path)
    other = GraphKey.of({"graph": "same", "compiler": "with -O1"})
    assert cache.get_or_compile(other, worker.compile_into)[1]
    assert [failure.digest for failure in cache.failures()] == [KEY.digest]


def passing(kind):
    if kind == "refused":
        return NotCompiledError("not in the cache and nothing may be compiled")
    error = CompileError("the compiler gave up")
    error.__cause__ = {
        "memory": MemoryError(),
        "interrupt": KeyboardInterrupt(),
        "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        "files": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    }[kind]
    return error


@pytest.mark.parametrize("kind", ["refused", "memory", "interrupt", "disk", "files"])
def test_what_may_pass_is_not_recorded(tmp_path, kind):
    def compile_into(staging):
        raise passing(kind)

    cache = CompileCache(tmp_path)
    with pytest.raises(CompileError):
        cache.get_or_compile(KEY, compile_into)
    assert cache.failures() == [] and cache.counters.failures_recorded == 0
    assert cache.get_or_compile(KEY, worker.compile_into)[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError, CacheError])
def test_only_compile_errors_are_recorded(tmp_path, error):
    def compile_into(staging):
        raise error("something else")

    cache = CompileCache(tmp_path)
    with pytest.raises((error, CacheError)):
        cache.get_or_compile(KEY, compile_into)
    assert cache.failures() == [] and list((tmp_path / "staging").iterdir()) == []


def test_a_full_disk_is_not_the_graphs_fault(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 30, 1 << 30, 1 << 20))
    cache = CompileCache(tmp_path)
    with pytest.raises(CompileError):
        cache.get_or_compile(KEY, fail)
    monkeypatch.undo()
    assert cache.failures() == []


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"key": "other"}', '{"key": 3, "error": 1, "created": 2, "facts": 5}']
)
def test_a_damaged_record_is_as_good_as_none(tmp_path, damage):
    failed_cache(tmp_path)
    (tmp_path / "failures" / KEY.digest / "failure.json").write_text(
        damage.replace("3", json.dumps(KEY.digest))
    )
    cache = CompileCache(tmp_path)
    assert cache.failures() == []
    assert cache.get_or_compile(KEY, worker.compile_into)[1]


@pytest.mark.parametrize("retry_failed", [False, True])
def test_processes_that_wait_for_a_failing_compile_do_not_repeat_it(tmp_path, retry_failed):
    if retry_failed:
        failed_cache(tmp_path / "cache")
    said = worker.ask_together(tmp_path, 4, seconds=1.0, fails=True, retry_failed=retry_failed)
    errors = sorted(one["error"].partition(":")[0] for one in said)
    assert errors == ["CompileError"] + ["RecordedFailure"] * 3
    assert len((tmp_path / "log").read_text().splitlines()) == 1
