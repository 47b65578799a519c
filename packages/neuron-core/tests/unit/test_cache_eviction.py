# SPDX-License-Identifier: Apache-2.0
"""Eviction keeps the limits, takes the least recently used first, and never what a living process uses."""

import itertools
import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_core.errors import CompileError, ConfigError
from neuron_core.graphs.cache import CompileCache, usage
from neuron_core.graphs.cache.process import ProcessMark
from neuron_core.graphs.cache.usage import FOREIGN_MARK_MAX_AGE_S, UsageMarks

WORKER = Path(__file__).with_name("cache_worker.py")
worker = SimpleNamespace(**runpy.run_path(str(WORKER)))
DAY_S = 86400.0


def fill(root, names, size=1000):
    """Entries compiled by a process that has ended."""
    process = worker.start("fill", root=root, sizes=dict.fromkeys(names, size))
    process.join(60)
    assert process.exitcode == 0
    return {name: root / "graphs" / worker.key(name).digest for name in names}


def set_used(folder, seconds_ago):
    when = time.time() - seconds_ago
    os.utime(folder / "COMPLETE", (when, when))


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def present(root):
    return {path.name for path in (root / "graphs").iterdir()}


def digests(*names):
    return {worker.key(name).digest for name in names}


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    root = tmp_path_factory.mktemp("eviction") / "cache"
    return root, fill(root, "abcdefgh")


@settings(max_examples=60, deadline=None)
@given(
    ages=st.lists(st.integers(1, 30), min_size=8, max_size=8, unique=True),
    limit=st.none() | st.integers(0, 20_000),
    older=st.none() | st.integers(0, 31),
)
def test_what_goes_equals_a_brute_force_choice(filled, ages, limit, older):
    """Of all sets of entries that may stay, the one that keeps as many recently used ones as the limits allow."""
    root, folders = filled
    names = list(folders)
    for name, age in zip(names, ages, strict=True):
        set_used(folders[name], age * DAY_S)
    sizes = [size_of(folder) for folder in folders.values()]
    by_age = sorted(range(8), key=lambda index: ages[index])
    kept = max(
        (
            by_age[:count]
            for count in range(9)
            if (limit is None or sum(sizes[index] for index in by_age[:count]) <= limit)
            and (older is None or all(ages[index] < older for index in by_age[:count]))
        ),
        key=len,
    )
    report = CompileCache(root).prune(limit, None if older is None else older * DAY_S, dry_run=True)
    expected = {folders[names[index]].name for index in set(range(8)) - set(kept)}
    assert set(report.evicted) == expected and report.in_use == []
    assert (report.kept, report.kept_bytes) == (len(kept), sum(sizes[index] for index in kept))
    assert report.evicted_bytes == sum(sizes) - report.kept_bytes
    assert present(root) == {folder.name for folder in folders.values()}


def test_entries_go_whole_and_in_order_and_are_counted(tmp_path):
    folders = fill(tmp_path, "abc")
    for age, name in enumerate("bca", start=1):
        set_used(folders[name], age * DAY_S)
    cache = CompileCache(tmp_path)
    report = cache.prune(max_bytes=2 * size_of(folders["a"]))
    assert report.evicted == [folders["a"].name] and present(tmp_path) == digests("b", "c")
    report = cache.prune(older_than_s=1.5 * DAY_S)
    assert report.evicted == [folders["c"].name] and cache.counters.evicted == 2
    assert list((tmp_path / "staging").iterdir()) == []
    cache.verify(folders["b"].name)


def test_asking_for_an_entry_makes_it_recent(tmp_path):
    folders = fill(tmp_path, "ab")
    set_used(folders["a"], 2 * DAY_S)
    set_used(folders["b"], DAY_S)
    process = worker.start("use", root=tmp_path, names=["a"], ready=(ready := tmp_path / "ready"))
    worker.wait_for(ready.exists)
    worker.kill(process)
    assert CompileCache(tmp_path).prune(max_bytes=size_of(folders["a"])).evicted == [folders["b"].name]


def test_what_another_process_has_loaded_stays_until_it_ends(tmp_path):
    folders = fill(tmp_path, "abc")
    process = worker.start("use", root=tmp_path, names=["a", "b"], ready=(ready := tmp_path / "ready"))
    worker.wait_for(ready.exists)
    assert json.loads(ready.read_text()) == [True, True]
    for folder in folders.values():
        set_used(folder, 100 * DAY_S)
    cache = CompileCache(tmp_path)
    try:
        for dry_run in (True, False):
            report = cache.prune(max_bytes=0, older_than_s=DAY_S, dry_run=dry_run)
            assert set(report.in_use) == digests("a", "b") and report.evicted == [folders["c"].name]
        assert present(tmp_path) == digests("a", "b") and report.kept == 2
        assert process.is_alive()
    finally:
        worker.kill(process)
    report = cache.prune(max_bytes=0)
    assert set(report.evicted) == digests("a", "b") and report.in_use == [] and report.users == 1
    assert list((tmp_path / "users").iterdir()) == []


def test_what_this_process_compiled_or_found_stays(tmp_path):
    folders = fill(tmp_path, "abc")
    cache = CompileCache(tmp_path)
    assert cache.lookup(folders["a"].name) is not None
    cache.get_or_compile(worker.key("d"), worker.compile_into)
    report = cache.prune(max_bytes=0)
    assert set(report.in_use) == digests("a", "d") == present(tmp_path)
    assert set(report.evicted) == digests("b", "c")


def test_a_process_that_looks_while_others_evict_finds_all_or_nothing(tmp_path):
    """What ``lookup`` returned can be read for as long as the process lives."""
    names = list("abcd")
    said = []
    for number in range(12):
        for name in names:
            CompileCache(tmp_path / "cache").get_or_compile(worker.key(name), worker.compile_into)
        for mark in (tmp_path / "cache" / "users").iterdir():
            mark.unlink()  # as if others had compiled them
        results = [tmp_path / f"{number}-{index}" for index in range(4)]
        processes = [
            worker.start("look_once", root=tmp_path / "cache", names=names, result=path) for path in results
        ]
        cache = CompileCache(tmp_path / "cache")
        while any(process.is_alive() for process in processes):
            cache.prune(max_bytes=0)
        said += [json.loads(path.read_text()) for path in results]
    assert all(one["right"] and one["invalid"] == 0 for one in said), said


def test_readers_never_see_half_an_entry(tmp_path):
    """Entries come and go as fast as they can while two processes look: nothing looks damaged."""
    names = list("abc")
    stop = tmp_path / "stop"
    results = [tmp_path / "r0", tmp_path / "r1"]
    root = tmp_path / "cache"
    cache = CompileCache(root)
    cache._roots.shared.marks.mark = lambda digest: None
    processes = [
        worker.start("look_unmarked", root=root, names=names, stop=stop, result=path) for path in results
    ]
    end = time.monotonic() + 3
    for name in itertools.cycle(names):
        cache.get_or_compile(worker.key(name), worker.compile_into)
        cache.prune(max_bytes=30_000)
        if time.monotonic() > end:
            break
    stop.touch()
    for process in processes:
        process.join(60)
    for path in results:
        said = json.loads(path.read_text())
        assert said["invalid"] == 0 and said["found"] and said["absent"]
    assert cache.counters.evicted > 0 and cache.counters.invalid == 0


def test_an_entry_asked_for_between_the_choice_and_the_move_comes_back(tmp_path, monkeypatch):
    folders = fill(tmp_path, "a")
    cache = CompileCache(tmp_path)
    asked = iter([set(), digests("a")])
    monkeypatch.setattr(UsageMarks, "in_use", lambda self: next(asked))
    report = cache.prune(max_bytes=0)
    assert report.in_use == [folders["a"].name] and report.evicted == [] and report.kept == 1
    cache.verify(folders["a"].name)
    assert list((tmp_path / "staging").iterdir()) == []


def foreign_mark(root, age_s):
    mark = ProcessMark("elsewhere-00000000", 7, 0.0)
    path = root / "users" / "elsewhere-00000000-7"
    path.write_text(json.dumps(mark.to_json()) + "\n" + worker.key("a").digest + "\n" + "abc")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_mark_of_another_host_counts_while_it_is_young(tmp_path):
    folders = fill(tmp_path, "a")
    cache = CompileCache(tmp_path)
    path = foreign_mark(tmp_path, FOREIGN_MARK_MAX_AGE_S - 60)
    assert cache.prune(max_bytes=0).in_use == [folders["a"].name] and path.exists()
    foreign_mark(tmp_path, FOREIGN_MARK_MAX_AGE_S + 60)
    assert cache.prune(max_bytes=0).evicted == [folders["a"].name] and not path.exists()


def test_a_living_process_refreshes_its_marks_and_writes_lost_ones_again(tmp_path):
    cache = CompileCache(tmp_path)
    cache.get_or_compile(worker.key("a"), worker.compile_into)
    cache.get_or_compile(worker.key("b"), worker.compile_into)
    (path,) = (tmp_path / "users").iterdir()
    os.utime(path, (0, 0))
    usage._own.refresh()
    assert time.time() - path.stat().st_mtime < 60
    path.unlink()
    usage._own.refresh()
    assert UsageMarks(tmp_path / "users").in_use() == digests("a", "b")
    path.unlink()
    cache.lookup(worker.key("a").digest)
    assert UsageMarks(tmp_path / "users").in_use() == digests("a", "b")


def test_a_pid_that_was_used_again_does_not_keep_entries(tmp_path):
    folders = fill(tmp_path, "a")
    me = ProcessMark.current()
    mark = ProcessMark(me.place, me.pid, me.start - 1)
    (tmp_path / "users" / f"{me.place}-{me.pid}").write_text(
        json.dumps(mark.to_json()) + "\n" + folders["a"].name + "\n"
    )
    assert CompileCache(tmp_path).prune(max_bytes=0).evicted == [folders["a"].name]


def test_the_marks_of_a_process_go_with_it(tmp_path):
    program = f"""
import os, runpy
w = runpy.run_path({str(WORKER)!r})
w["CompileCache"]({str(tmp_path)!r}).get_or_compile(w["key"](), w["compile_into"])
print(len(os.listdir({str(tmp_path / "users")!r})))
"""
    assert subprocess.check_output([sys.executable, "-c", program], timeout=120, text=True) == "1\n"
    assert list((tmp_path / "users").iterdir()) == [] and present(tmp_path) == digests("same")


def test_debris_goes_and_what_is_needed_stays(tmp_path):
    folders = fill(tmp_path, "ab")
    cache = CompileCache(tmp_path)
    for name, key in (("1", "a"), ("2", "b"), ("3", "gone"), ("4", "new")):
        cache.put_request(name * 64, {"components": dict(worker.key(key).components)})
    with pytest.raises(CompileError):
        cache.get_or_compile(worker.key("bad"), fail)
    set_used(folders["b"], 10 * DAY_S)
    old = time.time() - 10 * DAY_S
    os.utime(tmp_path / "requests" / f"{'3' * 64}.json", (old, old))
    (tmp_path / "locks" / "old.lock").touch()
    os.utime(tmp_path / "locks" / "old.lock", (old, old))
    (tmp_path / "staging" / "half-elsewhere-00000000-7-abcdefgh").mkdir()
    os.utime(tmp_path / "staging" / "half-elsewhere-00000000-7-abcdefgh", (old, old))
    (tmp_path / "staging" / "young-elsewhere-00000000-7-abcdefgh").mkdir()
    for dry_run in (True, False):
        report = cache.prune(older_than_s=5 * DAY_S, dry_run=dry_run)
        assert report.evicted == [folders["b"].name]
        assert (report.requests, report.failures, report.locks, report.staging) == (2, 0, 1, 1)
        assert report.dry_run == dry_run
    assert {path.stem[0] for path in (tmp_path / "requests").iterdir()} == {"1", "4"}
    assert [path.name[:5] for path in (tmp_path / "staging").iterdir()] == ["young"]
    assert not (tmp_path / "locks" / "old.lock").exists() and len(cache.failures()) == 1
    assert CompileCache(tmp_path).prune(older_than_s=0).failures == 1 and cache.failures() == []


def fail(staging):
    raise CompileError("no")


def test_a_lock_that_is_held_is_not_debris(tmp_path):
    cache = CompileCache(tmp_path)
    key = worker.key("a")

    def compile_into(staging):
        for path in (tmp_path / "locks").iterdir():
            os.utime(path, (0, 0))
        CompileCache(tmp_path).prune(older_than_s=DAY_S)
        assert (tmp_path / "locks" / f"{key.digest}.lock").exists()
        assert (tmp_path / "locks" / f"{key.digest}.owner").exists() and staging.is_dir()
        return worker.compile_into(staging)

    assert cache.get_or_compile(key, compile_into)[1]


def test_an_entry_without_sentinel_is_debris(tmp_path):
    folders = fill(tmp_path, "ab")
    (folders["a"] / "COMPLETE").unlink()
    assert CompileCache(tmp_path).prune().evicted == [folders["a"].name]
    assert present(tmp_path) == digests("b")


def test_a_limit_given_to_the_cache_holds_after_each_write(tmp_path, caplog):
    folders = fill(tmp_path, "abc")
    for age, name in enumerate("abc"):
        set_used(folders[name], (9 - age) * DAY_S)
    size = size_of(folders["a"])
    cache = CompileCache(tmp_path, max_bytes=int(2.5 * size))
    cache.get_or_compile(worker.key("d"), lambda staging: (staging / "a").write_bytes(b"x" * 1000) and {})
    assert present(tmp_path) == digests("c", "d") and cache.counters.evicted == 2 and caplog.text == ""
    small = CompileCache(tmp_path, max_bytes=1)
    for name in "ef":
        small.get_or_compile(worker.key(name), worker.compile_into)
    assert present(tmp_path) == digests("d", "e", "f")
    assert caplog.text.count("nothing in use is evicted") == 1


@pytest.mark.parametrize("limits", [{"max_bytes": -1}, {"older_than_s": -1.0}])
def test_a_limit_below_zero_is_refused(tmp_path, limits):
    (name,) = limits
    with pytest.raises(ConfigError, match=f"{name}=-1"):
        CompileCache(tmp_path).prune(**limits)
    if name == "max_bytes":
        with pytest.raises(ConfigError, match="max_bytes=-1"):
            CompileCache(tmp_path, max_bytes=-1)
