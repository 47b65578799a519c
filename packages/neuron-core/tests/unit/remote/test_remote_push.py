# SPDX-License-Identifier: Apache-2.0
"""A push publishes whole entries only, whoever else pushes, and whenever it is killed."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from neuron_core.errors import CacheError
from neuron_core.graphs.remote import Signer, TrustPolicy, request_document

WORKER = Path(__file__).with_name("remote_worker.py")
RECORD = {"components": {"graph": "9f2c"}, "outputs": [[1, 2]]}
REQUEST = hashlib.sha256(b"request").hexdigest()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def files(seed, count=3, size=200_000):
    return {f"part{i}.so": hashlib.shake_256(f"{seed} {i}".encode()).digest(size) for i in range(count)}


@pytest.fixture
def start_push(remote, tmp_path):
    """``start_push(entries, hold)``: a process that pushes; all of them sign with one key."""
    key = tmp_path / "worker-key.pem"
    key.write_bytes(Signer.generate()[0])
    started = []

    def start(entries, hold=None, requests=None):
        job = {
            "url": remote.url,
            "options": remote.options,
            "key": str(key),
            "entries": [str(entry) for entry in entries],
            "requests": requests or {},
            "hold": hold,
        }
        process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(job)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    start.trust = TrustPolicy(keys=(Signer.from_pem(key).public_key,))
    yield start
    for process in started:
        process.kill()
        process.wait()


def fetched(store, entry, folder, entry_files):
    """What a fetch brings, or None; whatever it brings is the entry as it was pushed."""
    folder.mkdir()
    if not store.fetch(entry.name, folder):
        assert list(folder.iterdir()) == []
        return None
    assert entry_files(folder) == entry_files(entry)
    return folder


def read_until(process, name):
    for line in process.stdout:
        if line.split()[-1] == name:
            return
    raise AssertionError(f"the push ended before {name}")


def test_a_second_push_sends_nothing(remote, open_store, write_entry, signer):
    entries = [write_entry(str(number), files(number)) for number in range(2)]
    store = open_store()
    first = store.push(entries, {REQUEST: RECORD}, signer=signer)
    assert (first.pushed, first.already_there, first.bytes) == (2, 0, 2 * 3 * 200_000)
    assert (first.requests_pushed, first.requests_already_there) == (1, 0)
    before = {name: remote.get(name) for name in remote.names()}
    again = store.push(entries, {REQUEST: RECORD}, signer=signer)
    assert (again.pushed, again.already_there, again.bytes) == (0, 2, 0)
    assert (again.requests_pushed, again.requests_already_there) == (0, 1)
    assert {name: remote.get(name) for name in remote.names()} == before


def test_equal_files_are_sent_once(open_store, write_entry):
    entries = [write_entry(name, {"same.so": b"x" * 1000, "own": name.encode()}) for name in ("a", "b")]
    assert open_store().push(entries, {}).bytes == 1000 + 1 + 1


@pytest.mark.parametrize("times", [1, 2])
def test_progress_counts_bytes_and_ends_with_the_entry(open_store, write_entry, signer, times):
    entry = write_entry("layer", {"a": b"12345", "b": b"123"})
    for _ in range(times):
        said: list[tuple[int, int, str]] = []
        open_store().push(
            [entry], {REQUEST: RECORD}, signer=signer, on_progress=lambda *s, to=said: to.append(s)
        )
    assert said[-2:] == [(8, 8, entry.name), (8, 8, REQUEST)]
    assert [done for done, _, _ in said] == sorted(done for done, _, _ in said)


@pytest.mark.parametrize(
    "damage",
    ["no sentinel", "flip", "truncate", "missing", "symlink", "folder link", "renamed", "no manifest", "lie"],
)
def test_an_entry_that_is_not_whole_is_not_pushed(remote, open_store, write_entry, tmp_path, damage):
    good = write_entry("good", files("good"))
    entry = write_entry("bad", {"deep/a.so": b"x" * 1000, "b": b"y"})
    file = entry / "deep" / "a.so"
    if damage == "no sentinel":
        (entry / "COMPLETE").unlink()
    elif damage == "flip":
        file.write_bytes(b"x" * 999 + b"z")
    elif damage == "truncate":
        file.write_bytes(b"x" * 999)
    elif damage == "missing":
        file.unlink()
    elif damage == "symlink":
        (tmp_path / "elsewhere").write_bytes(b"x" * 1000)
        file.unlink()
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "folder link":
        os.rename(entry / "deep", tmp_path / "deep")
        (entry / "deep").symlink_to(tmp_path / "deep")
    elif damage == "renamed":
        entry = entry.rename(entry.with_name(sha256(b"other")))
    elif damage == "no manifest":
        (entry / "manifest.json").unlink()
    elif damage == "manifest":
        (entry / "manifest.json").write_text((entry / "manifest.json").read_text().replace("1.5", "1.6"))
    else:
        manifest = json.loads((entry / "manifest.json").read_text())
        manifest["files"]["../../outside"] = manifest["files"].pop("b")
        content = json.dumps(manifest)
        (entry / "manifest.json").write_text(content)
        (entry / "COMPLETE").write_text(sha256(content.encode()))
    with pytest.raises(CacheError, match=str(entry)):
        open_store().push([good, entry], {})
    assert remote.names() == set()


def test_another_build_of_a_key_stays_if_it_is_vouched_for(
    open_store, write_entry, signer, trust, staging, tmp_path
):
    """Two hosts compile one key to different bytes: the first stays, and lists and signatures made for it hold."""
    entry = write_entry("layer", files("first"), host="one")
    first = (entry / "manifest.json").read_bytes()
    open_store().push([entry], {}, signer=signer)
    second = write_entry("layer", files("second"), host="two")
    for store, with_signer in ((open_store(trust), None), (open_store(), signer)):
        assert store.push([second], {}, signer=with_signer).already_there == 1
        assert store.digests() == [(entry.name, sha256(first))]
    stranger = tmp_path / "stranger.pem"
    stranger.write_bytes(Signer.generate()[0])
    for with_signer in (None, Signer.from_pem(stranger)):
        assert open_store().push([second], {}, signer=with_signer).pushed == 1
        assert open_store().digests() == [(entry.name, sha256((second / "manifest.json").read_bytes()))]
        assert not open_store(trust).fetch(entry.name, staging)


def test_a_signature_can_be_added_to_what_is_there(remote, open_store, write_entry, signer, trust, tmp_path):
    entry = write_entry("layer", files("layer"))
    other_path = tmp_path / "other.pem"
    other_path.write_bytes(Signer.generate()[0])
    other = Signer.from_pem(other_path)
    store = open_store()
    store.push([entry], {REQUEST: RECORD})
    for one in (other, signer):
        report = store.push([entry], {REQUEST: RECORD}, signer=one)
        assert (report.pushed, report.requests_pushed, report.bytes) == (1, 1, 0)
    for number, policy in enumerate((trust, TrustPolicy(keys=(other.public_key,)))):
        (tmp_path / str(number)).mkdir()
        assert open_store(policy).fetch(entry.name, tmp_path / str(number))
        assert open_store(policy).fetch_request(REQUEST) == RECORD
    assert store.push([entry], {}, signer=other).already_there == 1


def test_four_processes_may_push_the_same_key_at_once(
    remote, open_store, start_push, write_entry, tmp_path, entry_files
):
    """Each has a build of its own of two of the three keys."""
    entries = []
    for number in range(4):
        made = (
            write_entry("same", files("same")),
            write_entry("x", files(f"x{number}")),
            write_entry("y", files(number)),
        )
        folder = tmp_path / f"cache{number}" / "graphs"
        folder.mkdir(parents=True)
        entries.append([entry.rename(folder / entry.name) for entry in made])
    processes = [start_push(folders, requests={REQUEST: RECORD}) for folders in entries]
    for process in processes:
        said = process.communicate(timeout=120)[0].splitlines()[-1].split()
        assert said[0] == "pushed" and process.returncode == 0
    store = open_store(start_push.trust)
    assert store.fetch_request(REQUEST) == RECORD
    for index in range(3):
        name = entries[0][index].name
        target = tmp_path / f"fetched{index}"
        target.mkdir()
        assert store.fetch(name, target)
        assert entry_files(target) in [entry_files(folders[index]) for folders in entries]


@pytest.mark.parametrize("stage", ["first file", "last file", "entry"])
def test_a_push_killed_between_two_steps_leaves_no_entry(
    remote, open_store, start_push, write_entry, tmp_path, entry_files, stage
):
    whole, half, never = (write_entry(name, files(name)) for name in ("whole", "half", "never"))
    hold = {"first file": f"{half.name}/part0.so", "last file": f"{half.name}/part2.so", "entry": half.name}[
        stage
    ]
    worker = start_push([whole, half, never], hold, {REQUEST: RECORD})
    read_until(worker, hold)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    store = open_store(start_push.trust)
    seen = [
        fetched(store, entry, tmp_path / entry.name, entry_files) is not None
        for entry in (whole, half, never)
    ]
    assert seen == [True, stage == "entry", False]
    assert store.fetch_request(REQUEST) is None
    assert store.counters.refused == 0, "what is not published is absent, not damaged"


def check_killed_anywhere(open_store, remote, start_push, write_entry, tmp_path, entry_files, trials, seed):
    """Kill at random moments: what is visible is whole, and the next push completes the rest."""
    generator = random.Random(seed)
    entries = [write_entry(str(number), files(f"{seed} {number}", size=1_000_000)) for number in range(6)]
    steps = 6 * (3 + 1)
    for trial in range(trials):
        worker = start_push(entries)
        read_until(worker, "start")
        for _ in range(generator.randrange(steps)):
            worker.stdout.readline()
        time.sleep(generator.uniform(0, 0.01))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        store = open_store(start_push.trust)
        seen = [fetched(store, entry, tmp_path / f"{trial} {entry.name}", entry_files) for entry in entries]
        assert store.counters.refused == 0
        assert {name for name, _ in store.digests()} == {
            e.name for e, got in zip(entries, seen, strict=True) if got
        }
        for name in remote.names():
            if name.startswith("objects/"):
                assert sha256(remote.get(name)) == name.removeprefix("objects/")
            if name.startswith("entries/") or generator.random() < 0.5:
                remote.delete(name)
    last = start_push(entries)
    assert last.communicate(timeout=120)[0].split()[-3:] == ["pushed", "6", "0"]
    for entry in entries:
        assert fetched(store, entry, tmp_path / f"last {entry.name}", entry_files)


def test_a_push_killed_anywhere_leaves_whole_entries_only(
    open_store, remote, start_push, write_entry, tmp_path, entry_files
):
    check_killed_anywhere(open_store, remote, start_push, write_entry, tmp_path, entry_files, 3, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 5))
def test_a_push_killed_anywhere_leaves_whole_entries_only_many_times(
    open_store, remote, start_push, write_entry, tmp_path, entry_files, seed
):
    check_killed_anywhere(open_store, remote, start_push, write_entry, tmp_path, entry_files, 20, seed)


@pytest.mark.nightly
def test_a_file_sent_in_several_parts_comes_back_whole(
    open_store, write_entry, signer, trust, staging, entry_files
):
    """s3fs sends from 100 MiB on as a multipart upload."""
    entry = write_entry("large", {"model.neff": hashlib.shake_256(b"large").digest(110 << 20)})
    open_store().push([entry], {}, signer=signer)
    assert open_store(trust).fetch(entry.name, staging)
    assert entry_files(staging) == entry_files(entry)


def test_a_request_document_is_the_same_whatever_the_order_of_names(open_store):
    assert request_document(REQUEST, {"a": 1, "b": 2}) == request_document(REQUEST, {"b": 2, "a": 1})
    assert request_document(REQUEST, {"a": 1}) != request_document(sha256(b"other"), {"a": 1})
