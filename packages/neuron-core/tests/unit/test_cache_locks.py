# SPDX-License-Identifier: Apache-2.0
"""A key is compiled once however many ask, and a compile that dies is taken over at once."""

import errno
import itertools
import json
import logging
import os
import random
import runpy
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from neuron_core.errors import CacheError
from neuron_core.graphs.cache import CompileCache, locks
from neuron_core.graphs.cache.process import ProcessMark

worker = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("cache_worker.py"))))
KEY = worker.key()


@pytest.fixture
def no_flock(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)


def proceeds(root, damaged=False):
    """Ask after a kill: what is there loads right or is compiled, within the 5 s the cache promises.

    Nothing looks damaged, unless it was before the kill.
    """
    for entry in (root / "graphs").glob("*"):  # whole or absent, even before anything is checked
        files = {path.relative_to(entry).as_posix() for path in entry.rglob("*") if path.is_file()}
        assert files == {*worker.CONTENT, "manifest.json", "COMPLETE"}
    begun = time.monotonic()
    cache = CompileCache(root, lock_timeout_s=20)
    found = cache.lookup(KEY.digest)
    assert found is None or worker.read_all(found) == worker.CONTENT
    entry, compiled = cache.get_or_compile(KEY, worker.compile_into)
    assert time.monotonic() - begun < 5
    assert compiled == (found is None) and worker.read_all(entry) == worker.CONTENT
    assert list((root / "staging").iterdir()) == [] and cache.counters.invalid <= damaged
    return compiled


@pytest.mark.parametrize("soft", [False, True])
def test_eight_processes_that_ask_at_once_compile_once(tmp_path, soft):
    said = worker.ask_together(tmp_path, 8, seconds=0.3, soft=soft)
    assert all(one["right"] for one in said)
    assert sorted(one["compiled"] for one in said) == [False] * 7 + [True]
    assert sum(one["hits"] for one in said) == 7 and sum(one["misses"] for one in said) == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def kill_at_random_moments(tmp_path, count, seed):
    rng = random.Random(seed)
    pause = 0.004
    span = worker.ask_together(tmp_path, 1, pause=pause)[0]["seconds"]
    died_compiling = 0
    for index in range(count):
        folder = tmp_path / str(index)
        folder.mkdir()
        log = folder / "log"
        process = worker.start("ask", root=folder / "cache", result=folder / "result", log=log, pause=pause)
        worker.wait_for((folder / "cache").exists)
        time.sleep(rng.uniform(0, 1.2 * span))
        worker.kill(process)
        died_compiling += log.exists() and not (folder / "result").exists()
        assert proceeds(folder / "cache") or log.exists()
    # Moments before and after the compile count too, but most of the time goes into it.
    assert died_compiling >= count // 10


def test_killed_at_twenty_random_moments_the_next_one_proceeds(tmp_path):
    kill_at_random_moments(tmp_path, 20, seed=3)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_many_random_moments_the_next_one_proceeds(tmp_path, seed):
    kill_at_random_moments(tmp_path, 100, seed)


@pytest.mark.parametrize("rebuilds", [False, True])
def test_killed_before_any_file_system_call_the_next_one_proceeds(tmp_path, rebuilds):
    compiled = set()
    for number in itertools.count():
        root = tmp_path / str(number)
        if rebuilds:
            entry, _ = CompileCache(root).get_or_compile(KEY, worker.compile_into)
            (entry.path / "artifact.bin").write_bytes(b"damaged")
        process = worker.start("die_at_event", root=root, number=number)
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -9
        compiled.add(proceeds(root, damaged=rebuilds))
    assert number > 30 and compiled == {False, True}


def test_a_waiter_says_for_whom_and_a_timeout_names_the_owner(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locks, "REPORT_EVERY_S", 0.2)
    monkeypatch.setattr(locks, "LOOK_EVERY_S", 0.1)
    log = tmp_path / "log"
    process = worker.start("ask", root=tmp_path / "cache", result=tmp_path / "r", log=log, seconds=600)
    worker.wait_for(log.exists)
    owner = f"pid {process.pid} on {os.uname().nodename}, compiling for "
    try:
        cache = CompileCache(tmp_path / "cache", lock_timeout_s=1.0)
        with (
            caplog.at_level(logging.INFO, "neuron_core"),
            pytest.raises(CacheError, match=f"{owner}[1-9] s; end that process.*lock_timeout_s"),
        ):
            cache.get_or_compile(KEY, worker.compile_into)
        waiting = [record.message for record in caplog.records if f"waiting for {owner}" in record.message]
        assert len(waiting) > 2
    finally:
        worker.kill(process)


def test_a_lock_kept_open_by_a_child_of_the_dead_process_is_broken(tmp_path, impatient):
    ready = tmp_path / "ready"
    process = worker.start("leak_lock", root=tmp_path / "cache", ready=ready)
    worker.wait_for(ready.exists)
    worker.kill(process)
    child = psutil.Process(json.loads(ready.read_text()))
    try:
        assert proceeds(tmp_path / "cache")
        assert child.is_running()
    finally:
        child.kill()


def test_a_soft_lock_of_a_killed_process_is_broken(tmp_path, no_flock, impatient):
    log = tmp_path / "log"
    process = worker.start(
        "ask", root=tmp_path / "cache", result=tmp_path / "r", log=log, seconds=600, soft=True
    )
    worker.wait_for(log.exists)
    assert list((tmp_path / "cache" / "locks").glob("*.softlock"))
    worker.kill(process)
    assert proceeds(tmp_path / "cache")


@pytest.fixture
def impatient(monkeypatch):
    """A lock that looks abandoned is broken after a quarter of a second, not after 1.5 s."""
    monkeypatch.setattr(locks, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(locks, "GRACE_S", 0.25)


def leave_soft_lock(root, owner):
    """A soft lock as some process left it; filelock itself would call the pid in it alive."""
    CompileCache(root)
    (root / "locks" / f"{KEY.digest}.softlock").write_text(f"{os.getpid()}\n{os.uname().nodename}\n")
    if owner is not None:
        record = locks.Owner(owner, "compiling", time.time()).to_text()
        (root / "locks" / f"{KEY.digest}.owner").write_text(record)


def test_a_soft_lock_whose_pid_was_used_again_is_broken(tmp_path, no_flock, impatient):
    me = ProcessMark.current()
    leave_soft_lock(tmp_path, ProcessMark(me.place, me.pid, me.start - 1))
    assert proceeds(tmp_path)


def test_a_soft_lock_without_a_record_is_broken(tmp_path, no_flock):  # with the patience it has in use
    leave_soft_lock(tmp_path, None)
    assert proceeds(tmp_path)


def test_a_soft_lock_of_a_living_process_is_respected(tmp_path, no_flock, impatient):
    leave_soft_lock(tmp_path, ProcessMark.current())
    cache = CompileCache(tmp_path, lock_timeout_s=1.0)
    with pytest.raises(CacheError, match=f"pid {os.getpid()}"):
        cache.get_or_compile(KEY, worker.compile_into)


@pytest.mark.parametrize("beats", [True, False])
def test_a_soft_lock_of_another_host_holds_while_its_heart_beats(
    tmp_path, no_flock, impatient, monkeypatch, beats
):
    monkeypatch.setattr(locks, "SILENCE_S", 0.5)
    leave_soft_lock(tmp_path, ProcessMark("elsewhere-00000000", 1, 0.0))
    done = threading.Event()

    def beat():
        while not done.wait(0.05):
            os.utime(tmp_path / "locks" / f"{KEY.digest}.owner")

    thread = threading.Thread(target=beat)
    if beats:
        thread.start()
    try:
        cache = CompileCache(tmp_path, lock_timeout_s=1.5)
        if beats:
            with pytest.raises(CacheError, match="pid 1 on elsewhere"):
                cache.get_or_compile(KEY, worker.compile_into)
        else:
            assert cache.get_or_compile(KEY, worker.compile_into)[1]
    finally:
        done.set()
        if beats:
            thread.join()


def test_the_holder_of_a_soft_lock_touches_its_record(tmp_path, no_flock, monkeypatch):
    monkeypatch.setattr(locks, "HEARTBEAT_S", 0.05)
    record = tmp_path / "locks" / f"{KEY.digest}.owner"
    times = []

    def compile_into(staging):
        os.utime(record, (0, 0))
        worker.wait_for(lambda: record.stat().st_mtime > 0)
        times.append(record.stat().st_mtime)
        return worker.compile_into(staging)

    CompileCache(tmp_path).get_or_compile(KEY, compile_into)
    assert times and not record.exists()


def test_threads_of_one_process_share_a_compile(tmp_path):
    cache = CompileCache(tmp_path)
    compiled = []

    def compile_slowly(staging):
        time.sleep(0.2)
        return worker.compile_into(staging)

    threads = [
        threading.Thread(target=lambda: compiled.append(cache.get_or_compile(KEY, compile_slowly)[1]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(compiled) == [False, False, False, True]


def test_threads_that_meet_a_full_disk_fall_back_together(tmp_path):
    cache = CompileCache(tmp_path)
    barrier = threading.Barrier(3)
    done = []

    def compile_into(staging):
        if staging.is_relative_to(tmp_path):
            barrier.wait(30)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return worker.compile_into(staging)

    threads = [
        threading.Thread(
            target=lambda name=name: done.append(cache.get_or_compile(worker.key(name), compile_into))
        )
        for name in "abc"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [compiled for _, compiled in done] == [True] * 3


def test_a_process_is_known_by_its_start_too():
    me = ProcessMark.current()
    assert me.is_local and not me.is_gone
    assert ProcessMark(me.place, me.pid, me.start - 1).is_gone
    ticks = int(Path(f"/proc/{me.pid}/stat").read_text().rpartition(")")[2].split()[19])  # proc(5): starttime
    assert me.start == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"), abs=0.02)
    ended = worker.start("wait_for", condition=bool)
    worker.kill(ended)
    assert ProcessMark(me.place, ended.pid, time.time()).is_gone
    with subprocess.Popen(["sleep", "600"]) as zombie:
        started = psutil.Process(zombie.pid).create_time() - psutil.boot_time()
        assert not ProcessMark(me.place, zombie.pid, started).is_gone
        zombie.kill()
        worker.wait_for(lambda: ProcessMark(me.place, zombie.pid, started).is_gone)
        assert psutil.pid_exists(zombie.pid)  # nobody waited for it
    other = ProcessMark("elsewhere-00000000", ended.pid, 0.0)
    assert not other.is_local and not other.is_gone and str(other) == f"pid {ended.pid} on elsewhere"
    assert (
        me.host == os.uname().nodename and ProcessMark.from_json(json.loads(json.dumps(me.to_json()))) == me
    )
