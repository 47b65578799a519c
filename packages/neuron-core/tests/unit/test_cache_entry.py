# SPDX-License-Identifier: Apache-2.0
"""An entry is believed only while every byte of it is what was written, and its manifest tells the truth."""

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from neuron_core.errors import CacheError
from neuron_core.graphs.cache import CompileCache

worker = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("cache_worker.py"))))
KEY = worker.key()


def make(root, **facts):
    def compile_into(staging):
        return {**worker.compile_into(staging), **facts}

    return CompileCache(root).get_or_compile(KEY, compile_into)[0]


def files_of(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def is_refused_and_rebuilt(root):
    """Refused by ``verify``, which leaves it alone; then counted once and compiled again."""
    cache = CompileCache(root)
    with pytest.raises(CacheError, match=KEY.digest):
        cache.verify(KEY.digest)
    assert cache.counters.invalid == 0
    entry, compiled = cache.get_or_compile(KEY, worker.compile_into)
    assert compiled and cache.counters.invalid == 1 and worker.read_all(entry) == worker.CONTENT
    cache.verify(KEY.digest)
    assert list((root / "staging").iterdir()) == []


def test_a_flipped_bit_in_any_file_is_found(tmp_path):
    original = make(tmp_path / "original")
    flips = [
        (name, size * part // 5 if part < 5 else size - 1)
        for name in files_of(original.path)
        if (size := (original.path / name).stat().st_size)
        for part in range(6)
    ]
    assert {name for name, _ in flips} == {*worker.CONTENT, "manifest.json", "COMPLETE"}
    for number, (name, offset) in enumerate(flips):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "original", root)
        file = root / "graphs" / KEY.digest / name
        content = bytearray(file.read_bytes())
        content[offset] ^= 1 << (number % 8)
        file.write_bytes(content)
        is_refused_and_rebuilt(root)


@pytest.mark.parametrize("name", [*worker.CONTENT, "manifest.json", "COMPLETE"])
@pytest.mark.parametrize("how", ["empty", "short", "long", "gone"])
def test_a_file_of_another_length_is_found(tmp_path, name, how):
    file = make(tmp_path).path / name
    content = file.read_bytes()
    if how == "gone":
        file.unlink()
        if name == "COMPLETE":  # then there is no entry, which is no damage
            cache = CompileCache(tmp_path)
            assert cache.lookup(KEY.digest) is None and cache.counters.invalid == 0
            return
    else:
        file.write_bytes({"empty": b"", "short": content[:-1], "long": content + b"\n"}[how])
    is_refused_and_rebuilt(tmp_path)


def rewrite(entry, change):
    """A manifest that lies well: sealed like a true one."""
    manifest = json.loads((entry.path / "manifest.json").read_text())
    content = json.dumps(change(manifest) or manifest).encode()
    (entry.path / "manifest.json").write_bytes(content)
    (entry.path / "COMPLETE").write_text(hashlib.sha256(content).hexdigest())


def described(content):
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


LIES = {
    "another key": lambda m: m.update(key=worker.key("other").digest),
    "no key": lambda m: m.pop("key") and None,
    "a missing file": lambda m: m["files"].update({"more.bin": described(b"")}),
    "an unlisted file": lambda m: m["files"].pop("graph.json") and None,
    "another size": lambda m: m["files"]["graph.json"].update(size=1),
    "another hash": lambda m: m["files"]["graph.json"].update(sha256="0" * 64),
    "a size that is true": lambda m: m["files"]["graph.json"].update(size=True),
    "no hash": lambda m: m["files"]["graph.json"].pop("sha256") and None,
    "a hash that is none": lambda m: m["files"]["graph.json"].update(sha256=7),
    "a file above": lambda m: m["files"].update({"../outside.bin": described(b"outside")}),
    "a file far above": lambda m: m["files"].update({"kernels/../../outside.bin": described(b"outside")}),
    "an absolute file": lambda m: m["files"].update({"/etc/hostname": described(b"")}),
    "a file by two names": lambda m: m["files"].update({"./graph.json": m["files"]["graph.json"]}),
    "a file without name": lambda m: m["files"].update({"": described(b"")}),
    "the folder": lambda m: m["files"].update({".": described(b"")}),
    "itself": lambda m: m["files"].update({"manifest.json": described(b"")}),
    "no files": lambda m: m.pop("files") and None,
    "a list of files": lambda m: m.update(files=list(m["files"])),
    "names only": lambda m: m.update(files=dict.fromkeys(m["files"])),
    "a list": lambda m: [m],
    "a number": lambda m: 3,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(tmp_path, lie):
    entry = make(tmp_path)
    (tmp_path / "graphs" / "outside.bin").write_bytes(b"outside")
    rewrite(entry, LIES[lie])
    is_refused_and_rebuilt(tmp_path)
    assert (tmp_path / "graphs" / "outside.bin").read_bytes() == b"outside"


def test_a_manifest_that_is_no_json_however_deep_is_refused(tmp_path):
    entry = make(tmp_path)
    content = b'{"key":' * 100_000
    (entry.path / "manifest.json").write_bytes(content)
    (entry.path / "COMPLETE").write_text(hashlib.sha256(content).hexdigest())
    is_refused_and_rebuilt(tmp_path)


@pytest.mark.parametrize("planted", ["file", "folder", "dangling", "listed", "fifo", "manifest", "sentinel"])
def test_links_and_devices_in_an_entry_are_refused(tmp_path, planted):
    """Also where the link leads to the right content: it could lead elsewhere a moment later."""
    root = tmp_path / "cache"
    entry = make(root)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "code.so").write_bytes(worker.CONTENT["kernels/code.so"])
    if planted == "file":
        (entry.path / "extra").symlink_to(outside / "code.so")
    elif planted == "folder":
        shutil.rmtree(entry.path / "kernels")
        (entry.path / "kernels").symlink_to(outside)
    elif planted == "dangling":
        (entry.path / "extra").symlink_to(outside / "nothing")
    elif planted == "fifo":
        os.mkfifo(entry.path / "extra")
    else:
        name = {"listed": "kernels/code.so", "manifest": "manifest.json", "sentinel": "COMPLETE"}[planted]
        shutil.move(entry.path / name, outside / "moved")
        (entry.path / name).symlink_to(outside / "moved")
    is_refused_and_rebuilt(root)
    assert (outside / "code.so").read_bytes() == worker.CONTENT["kernels/code.so"]


def test_an_entry_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path):
    entry = make(tmp_path / "cache")
    shutil.move(entry.path, tmp_path / "moved")
    entry.path.symlink_to(tmp_path / "moved")
    is_refused_and_rebuilt(tmp_path / "cache")
    assert (tmp_path / "moved" / "artifact.bin").read_bytes() == worker.CONTENT["artifact.bin"]


@pytest.mark.parametrize("name", ["manifest.json", "COMPLETE", "link"])
def test_an_artifact_an_entry_cannot_hold_is_an_error_and_leaves_nothing(tmp_path, name):
    def compile_into(staging):
        if name == "link":
            (staging / name).symlink_to("/etc/hostname")
        else:
            (staging / name).write_text("{}")
        return {}

    cache = CompileCache(tmp_path)
    with pytest.raises(CacheError, match=name):
        cache.get_or_compile(KEY, compile_into)
    assert cache.lookup(KEY.digest) is None and list((tmp_path / "staging").iterdir()) == []


def test_facts_of_compiler_and_caller_are_kept_and_cannot_replace_what_the_cache_knows(tmp_path):
    lies = {"key": "other", "components": {}, "files": {}}
    facts = {"key_facts": {"flags": {"-O": "2"}, "inputs": [[2, 3]]}, "bucket": "decode_b4", **lies}
    cache = CompileCache(tmp_path)
    entry, _ = cache.get_or_compile(
        KEY, lambda staging: {**worker.compile_into(staging), **facts}, facts={"compiler": "fx", **lies}
    )
    found = CompileCache(tmp_path).lookup(KEY.digest)
    assert found.manifest == entry.manifest and found.digest == KEY.digest
    assert found.manifest["key_facts"] == facts["key_facts"] and found.manifest["bucket"] == "decode_b4"
    assert found.manifest["compiler"] == "fx" and found.manifest["part"] == "worker"
    assert found.manifest["key"] == KEY.digest and found.manifest["components"] == {"graph": "same"}
    assert found.manifest["files"] == {name: described(content) for name, content in worker.CONTENT.items()}


def test_entries_are_listed_unread_and_damage_is_not_hidden(tmp_path):
    cache = CompileCache(tmp_path)
    names = ["a", "b", "c"]
    for name in names:
        cache.get_or_compile(worker.key(name), worker.compile_into)
    keys = {worker.key(name).digest for name in names}
    listed = list(cache.entries())
    assert [entry.digest for entry in listed] == sorted(keys)
    sizes = subprocess.check_output(
        ["du", "-sb", "--apparent-size", *[str(e.path) for e in listed]], text=True
    )
    folders = [sum(1 for p in [e.path, *e.path.rglob("*")] if p.is_dir()) for e in listed]
    folder_bytes = listed[0].path.stat().st_size
    assert [entry.size_bytes for entry in listed] == [
        int(line.split()[0]) - count * folder_bytes
        for line, count in zip(sizes.splitlines(), folders, strict=True)
    ]
    (listed[0].path / "manifest.json").write_text("{")
    (listed[1].path / "COMPLETE").unlink()
    again = {entry.digest: entry.manifest for entry in CompileCache(tmp_path).entries()}
    assert again.keys() == keys - {listed[1].digest}
    assert again[listed[0].digest] == {} and again[listed[2].digest] == listed[2].manifest


def test_verify_says_what_is_missing_and_refuses_a_name_that_is_no_key(tmp_path):
    cache = CompileCache(tmp_path)
    with pytest.raises(CacheError, match=f"{KEY.digest} does not exist"):
        cache.verify(KEY.digest)
    for name in ("../requests", "abc", "", KEY.digest[:-1] + "G"):
        with pytest.raises(CacheError, match="64 hexadecimal digits"):
            cache.verify(name)


def test_seconds_saved_are_those_the_hits_took_to_compile(tmp_path):
    first = CompileCache(tmp_path)
    first.get_or_compile(KEY, lambda staging: {**worker.compile_into(staging), "seconds": 12.5})
    assert first.counters.seconds_saved == 0
    second = CompileCache(tmp_path)
    for _ in range(2):
        second.get_or_compile(KEY, worker.compile_into)
    assert (second.counters.hits, second.counters.seconds_saved) == (2, 25.0)
    assert second.counters.bytes_read == 2 * sum(map(len, worker.CONTENT.values()))


def test_requests_of_an_entry_are_those_that_lead_to_it(tmp_path):
    cache = CompileCache(tmp_path)
    other = worker.key("other")
    cache.put_request("1" * 64, {"components": dict(KEY.components), "outputs": [1]})
    cache.put_request("2" * 64, {"components": dict(other.components)})
    cache.put_request("3" * 64, {"components": dict(KEY.components)})
    cache.put_request("4" * 64, {"components": {"graph": 5}})
    cache.put_request("5" * 64, {"outputs": []})
    (tmp_path / "requests" / f"{'6' * 64}.json").write_text("[" * 100_000)
    found = cache.requests_of(KEY.digest)
    assert found == {"1" * 64: cache.get_request("1" * 64), "3" * 64: cache.get_request("3" * 64)}
    assert found["1" * 64]["outputs"] == [1] and cache.get_request("6" * 64) is None


def test_a_root_that_may_not_be_written_is_read_and_new_entries_go_elsewhere(tmp_path):
    root = tmp_path / "cache"
    make(root)
    public = Path(
        tempfile.mkdtemp(prefix="neuron-cache-test-")
    )  # what is in tmp_path is closed to other users
    try:
        shutil.move(root, public / "cache")
        for mark in (public / "cache" / "users").iterdir():
            mark.unlink()  # the entry was made by a process that has ended
        for path in (public, *public.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        process = worker.start("read_only", root=public / "cache", result=(result := tmp_path / "result"))
        process.join(60)
        assert json.loads(result.read_text()) == {
            "warned": True,
            "old": [False, True],
            "new": [True, False],
            "verified": 2,
            "prune": f"{public / 'cache'} cannot be written, so nothing can be removed from it",
            "would evict": 1,
            "private": (private := json.loads(result.read_text())["private"]),
        }
        assert not Path(private).exists() and not Path(private).is_relative_to(public)
        assert files_of(public / "cache" / "graphs" / KEY.digest) == sorted(
            [*worker.CONTENT, "manifest.json", "COMPLETE"]
        )
    finally:
        for path in (public, *public.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(public)
