# SPDX-License-Identifier: Apache-2.0
"""Bytes from a remote are an envelope, a manifest or a record of ours, or refused; nothing else comes out."""

import base64
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_core.errors import CacheError
from neuron_core.graphs.remote.envelope import (
    MAX_SIGNATURES,
    Envelope,
    RefusedError,
    entry_payloads,
    request_document,
    request_record,
)

KEY = hashlib.sha256(b"key").hexdigest()
FILE = {"sha256": hashlib.sha256(b"file").hexdigest(), "size": 4}
GOOD = Envelope(b'{"key": "x"}', {"0123456789abcdef": b"s" * 64})

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(
    ["a", "b.so", "..", ".", "", "~", "COMPLETE", "manifest.json", "C:", "a\\b", "a\0b", "\n", "ü"]
)
paths = st.lists(names, min_size=1, max_size=4).map("/".join) | st.text(max_size=12)


def manifest(files, **changes):
    return json.dumps({"key": KEY, "components": {}, "files": files, **changes}).encode()


def mutate(content, edits):
    content = bytearray(content)
    for position, value in edits:
        content[position % len(content)] = value
    return bytes(content)


@given(st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused(content):
    with pytest.raises(RefusedError):
        Envelope.from_bytes(content)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_changed_envelope_is_refused_or_says_what_it_says(edits):
    content = mutate(GOOD.to_bytes(), edits)
    try:
        read = Envelope.from_bytes(content)
    except RefusedError:
        return
    assert Envelope.from_bytes(read.to_bytes()) == read
    assert read.document.decode() == json.loads(content)["document"]


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update(extra=1),
        lambda e: e.pop("signatures"),
        lambda e: e.update(format=2),
        lambda e: e.update(format=True),
        lambda e: e.update(format="1"),
        lambda e: e.update(document=None),
        lambda e: e.update(document={"key": KEY}),
        lambda e: e.update(document="\ud800"),
        lambda e: e.update(signatures={}),
        lambda e: e.update(signatures=[None]),
        lambda e: e["signatures"][0].update(extra=1),
        lambda e: e["signatures"][0].update(key="0123456789ABCDEF"),
        lambda e: e["signatures"][0].update(key=7),
        lambda e: e["signatures"][0].update(signature="not base64!"),
        lambda e: e["signatures"][0].update(signature=7),
        lambda e: e.update(signatures=e["signatures"] * (MAX_SIGNATURES + 1)),
    ],
)
def test_an_envelope_with_anything_else_in_it_is_refused(change):
    parsed = json.loads(GOOD.to_bytes())
    change(parsed)
    with pytest.raises(RefusedError):
        Envelope.from_bytes(json.dumps(parsed).encode())


def test_a_name_given_twice_is_refused():
    """Two readers could otherwise see two documents in one file."""
    text = GOOD.to_bytes().decode()
    with pytest.raises(RefusedError, match="twice"):
        Envelope.from_bytes(text.replace("{", '{"document": "other", ', 1).encode())
    with pytest.raises(RefusedError, match="twice"):
        entry_payloads(manifest({"a": FILE}).replace(b"{", b'{"files": {}, ', 1), KEY)


@given(
    st.text(), st.dictionaries(st.text("0123456789abcdef", min_size=16, max_size=16), st.binary(), max_size=4)
)
def test_what_is_written_is_read_back(document, signatures):
    envelope = Envelope(document.encode("utf-8", "ignore"), signatures)
    assert Envelope.from_bytes(envelope.to_bytes()) == envelope


def test_signatures_of_strangers_cannot_keep_ours_out():
    crowd = Envelope(b"{}", {f"{number:016x}": b"s" for number in range(MAX_SIGNATURES)})
    signed = crowd.signed("f" * 16, b"ours").signed("f" * 16, b"ours again")
    assert Envelope.from_bytes(signed.to_bytes()).signatures["f" * 16] == b"ours again"
    assert len(signed.signatures) == MAX_SIGNATURES


def test_what_cannot_be_read_back_is_not_written():
    for document in (b"\xff", b"x" * (17 << 20)):
        with pytest.raises(CacheError, match="cannot be pushed"):
            Envelope(document, {}).to_bytes()


@given(st.dictionaries(paths, st.just(FILE), min_size=1, max_size=4))
def test_accepted_paths_lie_inside_the_entry_and_can_all_be_written(tmp_path_factory, files):
    try:
        payloads = entry_payloads(manifest(files), KEY)
    except RefusedError:
        return
    folder = tmp_path_factory.mktemp("entry").resolve()
    for payload in payloads:
        target = folder / payload.path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb"):
            pass
        assert target.resolve().is_relative_to(folder) and target.resolve() != folder
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert written == files.keys() and not written & {"manifest.json", "COMPLETE"}


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "", ".", "a\0", "a\n", "\u202eso.a", "COMPLETE",
     "manifest.json", "COMPLETE/x", "a\\..\\x", "x" * 256, "/".join(["x"] * 600)],
)  # fmt: skip
def test_a_path_that_leaves_or_disguises_itself_is_refused(path):
    assert entry_payloads(manifest({"fine": FILE}), KEY)
    with pytest.raises(RefusedError, match="no path inside an entry"):
        entry_payloads(manifest({"fine": FILE, path: FILE}), KEY)


@pytest.mark.parametrize(
    "described",
    [None, [], {}, {**FILE, "mode": 1}, {**FILE, "size": -1}, {**FILE, "size": True}, {**FILE, "size": 1.0},
     {**FILE, "size": "4"}, {**FILE, "size": 1 << 60}, {**FILE, "sha256": "A" * 64}, {**FILE, "sha256": "a" * 63},
     {**FILE, "sha256": "../" + "a" * 61}, {**FILE, "sha256": None}],
)  # fmt: skip
def test_a_file_described_otherwise_is_refused(described):
    with pytest.raises(RefusedError):
        entry_payloads(manifest({"file": described}), KEY)


@pytest.mark.parametrize(
    "document",
    [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"key": NaN}', b"1" * 5000, manifest({}), manifest([]),
     manifest({"a": FILE}, key="other"), manifest({"a": FILE}, key=None), manifest({"a": FILE, "a/b": FILE}),
     manifest({str(number): FILE for number in range(10_001)})],
)  # fmt: skip
def test_what_is_no_manifest_of_the_key_is_refused(document):
    with pytest.raises(RefusedError):
        entry_payloads(document, KEY)


@given(
    st.dictionaries(
        st.text(), json_values.filter(lambda v: "NaN" not in json.dumps(v) and "Infin" not in json.dumps(v))
    )
)
def test_a_record_is_read_back_under_its_own_name_only(record):
    document = request_document(KEY, record)
    assert request_record(document, KEY) == record
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(RefusedError):
        request_record(document, other)
    with pytest.raises(RefusedError):
        entry_payloads(document, KEY)


@pytest.mark.parametrize(
    "document", [b"[]", b"{}", manifest({"a": FILE}), b'{"record": [], "request": "%b"}' % KEY.encode()]
)
def test_what_is_no_record_is_refused(document):
    with pytest.raises(RefusedError):
        request_record(document, KEY)


def test_the_format_is_pinned():
    """Stores hold it for years: a change needs another format number and a reader of both."""
    assert json.loads(GOOD.to_bytes()) == {
        "format": 1,
        "document": '{"key": "x"}',
        "signatures": [{"key": "0123456789abcdef", "signature": base64.b64encode(b"s" * 64).decode()}],
    }
    assert request_document(KEY, {"b": 1, "a": "ü"}) == (
        b'{"record": {"a": "\\u00fc", "b": 1}, "request": "' + KEY.encode() + b'"}'
    )
