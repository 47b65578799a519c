# SPDX-License-Identifier: Apache-2.0
"""Entries go to a remote and come back byte for byte; what is not whole, not the right one or not approved does not."""

import hashlib
import json
import logging

import pytest

from neuron_core.errors import CacheError
from neuron_core.graphs.remote import Signer, TrustPolicy, request_document

FILES = {
    "kernels.so": bytes(range(256)) * 300,
    "wrapper.py": b"value = 1\n",
    "meta/empty": b"",
    "graph.txt": "ü → ŷ".encode(),
}
CHUNK = 8 << 20
ABSENT = hashlib.sha256(b"absent").hexdigest()
RECORD = {"components": {"graph": "9f2c"}, "outputs": [[1, 2]], "name": "ü"}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def manifest_of(folder):
    return (folder / "manifest.json").read_bytes()


def edit(remote, name, change):
    """Rewrite an envelope on the remote as somebody with write access could."""
    envelope = json.loads(remote.get(name))
    change(envelope)
    remote.put(name, json.dumps(envelope).encode())


def test_an_entry_comes_back_byte_for_byte(
    remote, open_store, write_entry, trust, signer, staging, entry_files
):
    entry = write_entry("layer", FILES)
    report = open_store().push([entry], {}, signer=signer)
    assert (report.pushed, report.already_there) == (1, 0)
    assert report.bytes == sum(map(len, FILES.values()))
    store = open_store(trust)
    assert store.fetch(entry.name, staging)
    assert entry_files(staging) == {**FILES, "manifest.json": manifest_of(entry)}
    assert (store.counters.hits, store.counters.bytes_downloaded) == (1, report.bytes)


def test_the_layout_is_the_one_documented(remote, open_store, write_entry, signer):
    entry = write_entry("layer", FILES)
    open_store().push([entry], {ABSENT: RECORD}, signer=signer)
    objects = {f"objects/{sha256(content)}" for content in FILES.values() if content}
    assert remote.names() == objects | {f"entries/{entry.name}.json", f"requests/{ABSENT}.json"}
    for name in objects:
        assert sha256(remote.get(name)) == name.removeprefix("objects/")
    envelope = json.loads(remote.get(f"entries/{entry.name}.json"))
    assert envelope["document"].encode() == manifest_of(entry)
    assert [signature["key"] for signature in envelope["signatures"]] == [signer.key_id]


def test_a_file_of_several_requests_comes_back_whole(remote, open_store, write_entry, trust, signer, staging):
    for number, size in enumerate((CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK)):
        content = hashlib.shake_256(bytes([number])).digest(size)
        entry = write_entry(f"large {number}", {"model.neff": content})
        open_store().push([entry], {}, signer=signer)
        folder = staging / str(number)
        folder.mkdir()
        assert open_store(trust).fetch(entry.name, folder)
        assert (folder / "model.neff").read_bytes() == content


def test_a_digest_list_approves_without_a_signature(remote, open_store, write_entry, staging):
    entry = write_entry("layer", FILES)
    open_store().push([entry], {ABSENT: RECORD})
    approved = frozenset({sha256(manifest_of(entry)), sha256(request_document(ABSENT, RECORD))})
    store = open_store(TrustPolicy(digests=approved))
    assert store.fetch(entry.name, staging)
    assert store.fetch_request(ABSENT) == RECORD
    assert store.counters.refused == 0


def test_what_is_absent_is_a_silent_miss(remote, open_store, write_entry, trust, signer, staging, caplog):
    entry = write_entry("layer", FILES)
    store = open_store(trust)
    with caplog.at_level(logging.INFO, logger="neuron_core"):
        assert not store.fetch(ABSENT, staging)
        assert store.fetch_request(ABSENT) is None
        assert store.digests() == [] and store.request_digests() == []
        assert (store.counters.misses, store.counters.refused, store.off_reason) == (2, 0, None)
        open_store().push([entry], {}, signer=signer)
        assert not store.fetch(ABSENT, staging)
        assert store.fetch(entry.name, staging), "a miss must not be remembered"
    assert caplog.text == ""


def test_nothing_is_used_while_nothing_is_approved(remote, open_store, write_entry, signer, staging, caplog):
    entries = [write_entry(name, FILES) for name in ("one", "two")]
    open_store().push(entries, {ABSENT: RECORD}, signer=signer)
    store = open_store(TrustPolicy())
    assert not any(store.fetch(entry.name, staging) for entry in entries)
    assert store.fetch_request(ABSENT) is None
    assert store.counters.refused == 3 and list(staging.iterdir()) == []
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "VLLM_NEURON_TRUSTED_DIGESTS" in warning and "VLLM_NEURON_TRUSTED_KEYS" in warning


@pytest.mark.parametrize("kind", ["nobody", "stranger", "other bytes", "other key id", "cut"])
def test_an_entry_nobody_trusted_signed_is_refused(
    remote, open_store, write_entry, trust, signer, staging, caplog, kind
):
    entry = write_entry("layer", FILES)
    stranger = Signer.from_pem(new_key(staging.parent))
    open_store().push(
        [entry], {}, signer=None if kind == "nobody" else stranger if kind == "stranger" else signer
    )

    def change(envelope):
        (signature,) = envelope["signatures"]
        if kind == "other bytes":
            envelope["document"] = envelope["document"].replace('"seconds": 1.5', '"seconds": 1.6')
        elif kind == "other key id":
            signature["key"] = stranger.key_id
        elif kind == "cut":
            signature["signature"] = signature["signature"][:-8]

    if kind in ("other bytes", "other key id", "cut"):
        edit(remote, f"entries/{entry.name}.json", change)
    store = open_store(trust)
    assert not store.fetch(entry.name, staging)
    assert store.counters.refused == 1 and list(staging.iterdir()) == []
    assert f"entry {entry.name} is refused" in caplog.text


def new_key(folder):
    (folder / "stranger.pem").write_bytes(Signer.generate()[0])
    return folder / "stranger.pem"


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "extend", "remove"])
def test_a_damaged_object_is_refused_and_nothing_stays(
    remote, open_store, write_entry, trust, signer, staging, caplog, damage
):
    entry = write_entry("layer", FILES)
    open_store().push([entry], {}, signer=signer)
    name = f"objects/{sha256(FILES['kernels.so'])}"
    content = bytearray(remote.get(name))
    if damage == "flip":
        content[4321] ^= 1
    damaged = {"truncate": content[:-1], "empty": b"", "extend": content + b"x"}.get(damage, content)
    remote.delete(name) if damage == "remove" else remote.put(name, bytes(damaged))
    store = open_store(trust)
    assert not store.fetch(entry.name, staging)
    assert store.counters.refused == 1 and list(staging.iterdir()) == []
    reason = {"flip": "does not match its SHA-256", "remove": "is missing"}.get(damage, "bytes long")
    assert (
        f"the object of 'kernels.so' {reason}" in caplog.text.replace("is not 76800 ", "")
        and not store.off_reason
    )
    if damage != "flip":  # a changed object of the right size is found by readers, not by push
        assert open_store().push([entry], {}, signer=signer).pushed == 1
        assert store.fetch(entry.name, staging)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null", b"x" * ((16 << 20) + 1)]
)
def test_an_envelope_that_is_none_is_refused_and_replaced(
    remote, open_store, write_entry, trust, signer, staging, content
):
    entry = write_entry("layer", FILES)
    remote.put("objects/placeholder", b"x")  # makes the folders
    remote.put(f"entries/{entry.name}.json", content)
    store = open_store(trust)
    assert not store.fetch(entry.name, staging)
    assert store.counters.refused == 1 and store.off_reason is None
    assert store.push([entry], {}, signer=signer).pushed == 1
    assert store.fetch(entry.name, staging)


def test_an_approved_document_does_not_pass_for_another(
    remote, open_store, write_entry, trust, signer, staging, caplog
):
    """Every document here carries a good signature; each lies under a name that is not its own."""
    one, two = (write_entry(name, FILES) for name in ("one", "two"))
    store = open_store(trust)
    store.push([one], {ABSENT: RECORD, two.name: RECORD}, signer=signer)
    remote.put(f"entries/{two.name}.json", remote.get(f"entries/{one.name}.json"))
    remote.put(f"requests/{one.name}.json", remote.get(f"entries/{one.name}.json"))
    remote.put(f"entries/{ABSENT}.json", remote.get(f"requests/{ABSENT}.json"))
    remote.put(f"requests/{two.name}.json", remote.get(f"requests/{ABSENT}.json"))
    assert not store.fetch(two.name, staging) and not store.fetch(ABSENT, staging)
    assert store.fetch_request(one.name) is None and store.fetch_request(two.name) is None
    assert store.counters.refused == 4
    assert store.fetch(one.name, staging) and store.fetch_request(ABSENT) == RECORD


def test_digests_are_those_of_the_manifests(remote, open_store, write_entry, caplog):
    entries = [write_entry(name, FILES) for name in ("one", "two", "three")]
    store = open_store()
    store.push(entries, {ABSENT: RECORD})
    remote.put("entries/notes.txt", b"hello")
    remote.put("entries/zz.json", b"hello")
    assert store.digests() == sorted((entry.name, sha256(manifest_of(entry))) for entry in entries)
    assert store.request_digests() == [(ABSENT, sha256(request_document(ABSENT, RECORD)))]
    assert "notes.txt" in caplog.text and "zz.json" in caplog.text


@pytest.mark.parametrize("digest", ["", "abc", "../" + "a" * 61, "A" * 64, "a" * 63 + "\n", "a" * 63 + "/"])
def test_a_name_that_is_no_digest_never_reaches_the_remote(tmp_path, open_store, staging, digest):
    store = open_store()
    with pytest.raises(CacheError, match="not a SHA-256"):
        store.fetch(digest, staging)
    with pytest.raises(CacheError, match="not a SHA-256"):
        store.fetch_request(digest)
    with pytest.raises(CacheError, match="not a SHA-256"):
        store.push([], {digest: RECORD})


def test_only_an_empty_folder_is_filled(open_store, staging, tmp_path):
    store = open_store()
    (staging / "kept").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (staging, tmp_path / "missing", staging / "kept", tmp_path / "link"):
        with pytest.raises(CacheError, match="must be an empty folder"):
            store.fetch(ABSENT, folder)
    assert (staging / "kept").read_text() == "mine"
