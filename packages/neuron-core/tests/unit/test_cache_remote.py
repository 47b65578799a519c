# SPDX-License-Identifier: Apache-2.0
"""What is not here is taken from the remote store once, checked like anything else, and kept."""

import errno
import hashlib
import json
import os
import runpy
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from neuron_core.errors import CompileError
from neuron_core.graphs.cache import CompileCache, RecordedFailure
from neuron_core.graphs.remote import RemoteStore, TrustPolicy

worker = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("cache_worker.py"))))
KEY = worker.key()
REQUEST = "7" * 64
RECORD = {"components": dict(KEY.components), "outputs": []}
SIZE = sum(map(len, worker.CONTENT.values()))


def never(staging):
    raise AssertionError("compiled again")


def fail(staging):
    raise CompileError("no compiler")


@pytest.fixture
def address(tmp_path):
    """A store on a file system, with one entry of 9 s and one request record."""
    cache = CompileCache(tmp_path / "origin")
    entry, _ = cache.get_or_compile(KEY, lambda staging: {**worker.compile_into(staging), "seconds": 9.0})
    cache.put_request(REQUEST, RECORD)
    url = f"file://{tmp_path}/store"
    RemoteStore.open(url, trust=TrustPolicy()).push([entry.path], cache.requests_of(KEY.digest))
    return url


def opened(address):
    """The store, for someone whose digest list holds what is in it now."""
    store = RemoteStore.open(address, trust=TrustPolicy())
    approved = {sha256 for _, sha256 in (*store.digests(), *store.request_digests())}
    return RemoteStore.open(address, trust=TrustPolicy(digests=frozenset(approved)))


@pytest.mark.parametrize("through", ["find", "get_or_compile"])
def test_an_approved_entry_is_fetched_kept_and_verified(tmp_path, address, through):
    root = tmp_path / "cache"
    cache = CompileCache(root, remote=opened(address))
    if through == "find":
        entry = cache.find(KEY.digest)
    else:
        entry, compiled = cache.get_or_compile(KEY, never)
        assert not compiled
    assert worker.read_all(entry) == worker.CONTENT and entry.path.is_relative_to(root)
    counters = cache.counters
    assert (counters.remote_hits, counters.remote_misses, counters.remote_refused) == (1, 0, 0)
    assert (counters.bytes_downloaded, counters.misses) == (SIZE, 0)
    hits = 1 if through == "get_or_compile" else 0
    assert (counters.hits, counters.seconds_saved) == (hits, 9.0 * hits)
    assert list((root / "staging").iterdir()) == []
    alone = CompileCache(root)
    alone.verify(KEY.digest)
    assert alone.lookup(KEY.digest).manifest == entry.manifest


def test_an_absent_entry_is_asked_for_once_and_compiled(tmp_path, address):
    cache = CompileCache(tmp_path / "cache", remote=opened(address))
    other = worker.key("other")
    assert cache.find(other.digest) is None
    assert cache.get_or_compile(other, worker.compile_into)[1]
    assert (cache.counters.remote_misses, cache.remote.counters.misses, cache.counters.misses) == (1, 1, 1)


def test_an_entry_nobody_approved_is_refused_and_compiled(tmp_path, address):
    cache = CompileCache(tmp_path / "cache", remote=RemoteStore.open(address, trust=TrustPolicy()))
    assert cache.get_request(REQUEST) is None and cache.find(KEY.digest) is None
    assert cache.get_or_compile(KEY, worker.compile_into)[1]
    assert (cache.counters.remote_refused, cache.counters.remote_hits) == (2, 0)


def test_requests_are_fetched_and_kept(tmp_path, address):
    cache = CompileCache(tmp_path / "cache", remote=opened(address))
    assert cache.get_request(REQUEST) == RECORD and cache.get_request("8" * 64) is None
    assert CompileCache(tmp_path / "cache").get_request(REQUEST) == RECORD


def test_a_damaged_object_is_refused(tmp_path, address):
    store = opened(address)
    objects = [path for path in (tmp_path / "store" / "objects").rglob("*") if path.is_file()]
    for path in objects:
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
    cache = CompileCache(tmp_path / "cache", remote=store)
    assert cache.find(KEY.digest) is None and cache.counters.remote_refused == 1
    assert list((tmp_path / "cache" / "graphs").iterdir()) == []


class Source:
    """A remote store whose own checks failed: it brings whatever it is told to."""

    def __init__(self, bring, error=None):
        self.bring = bring
        self.error = error
        self.counters = SimpleNamespace(refused=0)
        self.asked = 0

    def fetch(self, digest, staging):
        self.asked += 1
        if self.error is not None:
            raise self.error
        self.bring(staging)
        return True

    def fetch_request(self, digest):
        return None


def bring_truth(staging, **changes):
    facts = worker.compile_into(staging)
    files = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in worker.CONTENT.items()
    }
    manifest = {"key": KEY.digest, "files": files, **facts, **changes}
    (staging / "manifest.json").write_text(json.dumps(manifest))


def other_key(staging):
    bring_truth(staging, key=worker.key("other").digest)


def wrong_file(staging):
    bring_truth(staging)
    (staging / "artifact.bin").write_bytes(b"native code of somebody else")


def unlisted_file(staging):
    bring_truth(staging)
    (staging / "extra.so").write_bytes(b"")


def no_manifest(staging):
    worker.compile_into(staging)


def linked_manifest(staging):
    bring_truth(staging)
    (staging / "manifest.json").rename(staging.parent / "manifest.json")
    (staging / "manifest.json").symlink_to(staging.parent / "manifest.json")


def linked_sentinel(staging):
    bring_truth(staging)
    (staging / "COMPLETE").symlink_to(staging.parent.parent / "victim")


def own_sentinel(staging):
    bring_truth(staging)
    (staging / "COMPLETE").write_text("it is")


@pytest.mark.parametrize(
    "bring",
    [other_key, wrong_file, unlisted_file, no_manifest, linked_manifest, linked_sentinel, own_sentinel],
)
def test_the_local_check_does_not_rely_on_the_store(tmp_path, bring):
    cache = CompileCache(tmp_path, remote=Source(bring))
    (tmp_path / "victim").write_text("untouched")
    assert cache.find(KEY.digest) is None
    assert cache.counters.remote_refused == 1 and list((tmp_path / "graphs").iterdir()) == []
    assert (tmp_path / "victim").read_text() == "untouched"
    entry, compiled = cache.get_or_compile(KEY, worker.compile_into)
    assert compiled and worker.read_all(entry) == worker.CONTENT and cache.remote.asked == 1


def test_a_true_entry_of_the_same_source_is_taken(tmp_path):
    cache = CompileCache(tmp_path, remote=Source(bring_truth))
    assert worker.read_all(cache.find(KEY.digest)) == worker.CONTENT


def test_many_threads_fetch_an_entry_once(tmp_path):
    cache = CompileCache(tmp_path, remote=Source(bring_truth))
    found = []
    threads = [threading.Thread(target=lambda: found.append(cache.find(KEY.digest))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and None not in found and cache.remote.asked == 1


def test_an_entry_made_elsewhere_comes_before_a_recorded_failure(tmp_path, address):
    with pytest.raises(CompileError):
        CompileCache(tmp_path / "cache").get_or_compile(KEY, fail)
    with pytest.raises(RecordedFailure):
        CompileCache(tmp_path / "cache").get_or_compile(KEY, never)
    cache = CompileCache(tmp_path / "cache", remote=opened(address))
    assert not cache.get_or_compile(KEY, never)[1] and cache.failures() == []


def test_a_full_disk_while_fetching_falls_back(tmp_path):
    source = Source(bring_truth, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def recover(staging):
        source.error = None if not staging.is_relative_to(tmp_path) else source.error

    original = source.fetch
    source.fetch = lambda digest, staging: (recover(staging), original(digest, staging))[1]
    cache = CompileCache(tmp_path, remote=source)
    entry = cache.find(KEY.digest)
    assert worker.read_all(entry) == worker.CONTENT and not entry.path.is_relative_to(tmp_path)
    assert list((tmp_path / "staging").iterdir()) == []
