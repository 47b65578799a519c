# SPDX-License-Identifier: Apache-2.0
"""Somebody who can write to the remote plants native code; none of it runs, and none of it stays here."""

import ast
import ctypes
import hashlib
import importlib.util
import json
import logging
import pickle
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.key import GraphKey
from neuron_core.graphs.remote import TrustPolicy

COMPILER = shutil.which("cc") or shutil.which("gcc")


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def traps(tmp_path):
    """Files that each make a file of their own when loaded, and the folder they make it in."""
    sprung = tmp_path / "sprung"
    sprung.mkdir()
    source = tmp_path / "kernels.c"
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void spring(void)"
        f' {{ FILE *file = fopen("{sprung}/library", "w"); if (file) fclose(file); }}\n'
    )
    planted = {
        "graph.pkl": pickle.dumps(Trap(sprung / "pickle")),
        "wrapper.py": f"open({str(sprung / 'module')!r}, 'w').close()\n".encode(),
        "__init__.py": f"open({str(sprung / 'package')!r}, 'w').close()\n".encode(),
    }
    if COMPILER:
        library = tmp_path / "kernels.so"
        subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source], check=True)
        planted["kernels.so"] = library.read_bytes()
    return planted, sprung


def test_the_traps_work(traps, tmp_path):
    planted, sprung = traps
    for name, content in planted.items():
        (tmp_path / name).write_bytes(content)
    pickle.loads(planted["graph.pkl"]).close()
    for name in ("wrapper.py", "__init__.py"):
        runpy.run_path(str(tmp_path / name))
    expected = {"pickle", "module", "package"}
    if COMPILER:
        ctypes.CDLL(str(tmp_path / "kernels.so"))
        expected.add("library")
    assert {path.name for path in sprung.iterdir()} == expected


def test_an_unsigned_entry_is_refused_unread(open_store, write_entry, traps, trust, staging, caplog):
    planted, sprung = traps
    entry = write_entry("layer", planted)
    open_store().push([entry], {})
    for policy in (
        TrustPolicy(),
        trust,
        TrustPolicy(digests=frozenset({hashlib.sha256(b"other").hexdigest()})),
    ):
        store = open_store(policy)
        with caplog.at_level(logging.WARNING):
            assert not store.fetch(entry.name, staging)
        assert (store.counters.refused, store.counters.bytes_downloaded) == (1, 0), (
            "no file of it is even asked for"
        )
        assert list(staging.iterdir()) == []
    assert list(sprung.iterdir()) == [] and "refused" in caplog.text


@pytest.mark.parametrize("same_size", [True, False])
def test_files_swapped_behind_a_good_signature_are_refused(
    remote, open_store, write_entry, traps, trust, signer, staging, same_size
):
    """The envelope is the signed original; each object in turn holds a trap instead."""
    planted, sprung = traps
    honest = {name: bytes(len(content)) if same_size else b"honest" for name, content in planted.items()}
    for name, trap in planted.items():
        entry = write_entry(f"layer {name}", {**honest, name: name.encode() + honest[name]})
        content = (entry / name).read_bytes()
        open_store().push([entry], {}, signer=signer)
        swapped = trap + bytes(max(0, len(content) - len(trap)))
        remote.put(f"objects/{hashlib.sha256(content).hexdigest()}", swapped)
        store = open_store(trust)
        assert not store.fetch(entry.name, staging)
        assert store.counters.refused == 1 and list(staging.iterdir()) == []
    assert list(sprung.iterdir()) == []


def test_a_manifest_changed_after_signing_is_refused(
    remote, open_store, write_entry, traps, trust, signer, staging
):
    planted, sprung = traps
    entry = write_entry("layer", {"wrapper.py": b"honest"})
    open_store().push([entry], {}, signer=signer)
    trap = planted["wrapper.py"]
    remote.put(f"objects/{hashlib.sha256(trap).hexdigest()}", trap)
    envelope = json.loads(remote.get(f"entries/{entry.name}.json"))
    manifest = json.loads(envelope["document"])
    manifest["files"]["wrapper.py"] = {"sha256": hashlib.sha256(trap).hexdigest(), "size": len(trap)}
    envelope["document"] = json.dumps(manifest)
    remote.put(f"entries/{entry.name}.json", json.dumps(envelope).encode())
    store = open_store(trust)
    assert not store.fetch(entry.name, staging)
    assert store.counters.refused == 1 and list(staging.iterdir()) == [] and list(sprung.iterdir()) == []


def test_an_approved_entry_is_brought_but_nothing_of_it_is_loaded(
    open_store, write_entry, traps, trust, signer, staging, entry_files
):
    planted, sprung = traps
    entry = write_entry("layer", planted)
    before = set(sys.modules)
    open_store().push([entry], {}, signer=signer)
    assert open_store(trust).fetch(entry.name, staging)
    assert entry_files(staging) == entry_files(entry)
    assert list(sprung.iterdir()) == []
    assert not {name for name in set(sys.modules) - before if "wrapper" in name or "kernels" in name}


@pytest.mark.parametrize("tampered", ["unsigned", "swapped"])
def test_the_cache_compiles_afresh_and_keeps_nothing_planted(
    remote, open_store, write_entry, traps, trust, signer, tmp_path, tampered
):
    """The whole way: a cache with this remote, asked for the key somebody planted an entry for."""
    planted, sprung = traps
    key = GraphKey.of({"graph": "layer"})
    entry = write_entry("layer", planted if tampered == "unsigned" else dict.fromkeys(planted, b"honest"))
    entry = entry.rename(entry.with_name(key.digest))
    manifest = json.loads((entry / "manifest.json").read_text()) | {"key": key.digest}
    (entry / "manifest.json").write_text(json.dumps(manifest))
    (entry / "COMPLETE").write_text(hashlib.sha256((entry / "manifest.json").read_bytes()).hexdigest())
    open_store().push([entry], {}, signer=None if tampered == "unsigned" else signer)
    if tampered == "swapped":
        remote.put(f"objects/{hashlib.sha256(b'honest').hexdigest()}", planted["wrapper.py"])

    def compile_into(staging):
        (staging / "wrapper.py").write_bytes(b"compiled here")
        return {}

    cache = CompileCache(tmp_path / "mine", remote=open_store(trust))
    found, compiled = cache.get_or_compile(key, compile_into)
    assert compiled and (found.path / "wrapper.py").read_bytes() == b"compiled here"
    assert cache.counters.remote_refused == 1 and cache.counters.remote_hits == 0
    kept = [path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()]
    assert not {content for content in planted.values() if content in kept}
    assert list(sprung.iterdir()) == []


def test_the_cache_takes_an_approved_entry_instead_of_compiling(open_store, trust, signer, tmp_path):
    key = GraphKey.of({"graph": "layer"})

    def compile_into(staging):
        (staging / "wrapper.py").write_bytes(b"compiled there")
        return {"part": "layer"}

    def never(staging):
        raise AssertionError("compiled although the remote has it")

    there, _ = CompileCache(tmp_path / "theirs").get_or_compile(key, compile_into)
    open_store().push([there.path], {}, signer=signer)
    cache = CompileCache(tmp_path / "mine", remote=open_store(trust))
    found, compiled = cache.get_or_compile(key, never)
    assert not compiled and (found.path / "wrapper.py").read_bytes() == b"compiled there"
    assert (cache.counters.remote_hits, cache.counters.remote_refused) == (1, 0)
    assert not CompileCache(tmp_path / "mine").get_or_compile(key, never)[1]


def test_the_remote_code_imports_nothing_that_unpickles_or_loads():
    """Read off the sources: neither a call nor an import that could run what was fetched."""
    spec = importlib.util.find_spec("neuron_core.graphs.remote")
    for path in Path(spec.submodule_search_locations[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "marshal", "ctypes", "importlib", "runpy", "torch"} & {
                    name.partition(".")[0] for name in names
                }, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), path
