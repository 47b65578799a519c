# SPDX-License-Identifier: Apache-2.0
"""A document is approved by its digest in the list or by a trusted key's signature over exactly its bytes."""

import hashlib
import shutil
import stat
import subprocess

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from neuron_core.errors import CacheError, ConfigError
from neuron_core.graphs.remote import Signer, TrustPolicy, key_id, write_private_key

# RFC 8032, section 7.1, test 3.
RFC_SECRET = bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7")
RFC_PUBLIC = bytes.fromhex("fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025")
RFC_MESSAGE = bytes.fromhex("af82")
RFC_SIGNATURE = bytes.fromhex(
    "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
    "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
)


def key_pair(folder, name="key", password=None):
    private, public = Signer.generate(password)
    (folder / f"{name}.pem").write_bytes(private)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / f"{name}.pem", folder / f"{name}.pub"


def test_signatures_are_those_of_rfc_8032():
    signer = Signer(Ed25519PrivateKey.from_private_bytes(RFC_SECRET))
    assert signer.sign(RFC_MESSAGE) == RFC_SIGNATURE
    assert signer.key_id == hashlib.sha256(RFC_PUBLIC).hexdigest()[:16]
    policy = TrustPolicy(keys=(signer.public_key,))
    assert policy.approves(RFC_MESSAGE, {signer.key_id: RFC_SIGNATURE})
    assert not policy.approves(RFC_MESSAGE + b" ", {signer.key_id: RFC_SIGNATURE})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to compare with")
def test_openssl_accepts_a_signature_and_we_accept_openssls(tmp_path):
    private, public = key_pair(tmp_path)
    document = tmp_path / "manifest.json"
    document.write_bytes(b'{"key": "9f2c"}')
    signer = Signer.from_pem(private)
    (tmp_path / "ours").write_bytes(signer.sign(document.read_bytes()))
    run = ["openssl", "pkeyutl", "-rawin", "-in", document]
    subprocess.run([*run, "-verify", "-pubin", "-inkey", public, "-sigfile", tmp_path / "ours"], check=True)
    subprocess.run([*run, "-sign", "-inkey", private, "-out", tmp_path / "theirs"], check=True)
    policy = TrustPolicy.from_files(None, [public])
    assert policy.approves(document.read_bytes(), {signer.key_id: (tmp_path / "theirs").read_bytes()})


def test_only_the_right_key_over_the_right_bytes_approves(tmp_path):
    ours, other = (Signer.from_pem(key_pair(tmp_path, name)[0]) for name in ("ours", "other"))
    policy = TrustPolicy(keys=(ours.public_key,))
    document = b"document"
    good = ours.sign(document)
    assert policy.approves(document, {other.key_id: other.sign(document), ours.key_id: good})
    assert not policy.approves(document, {})
    assert not policy.approves(document, {other.key_id: other.sign(document)})
    assert not policy.approves(document, {ours.key_id: other.sign(document)})
    assert not policy.approves(document, {other.key_id: good})
    assert not policy.approves(document, {ours.key_id: good[:-1]})
    assert not policy.approves(document, {ours.key_id: b""})
    assert not policy.approves(b"Document", {ours.key_id: good})


def test_a_digest_list_is_what_sha256sum_prints(tmp_path):
    manifests = []
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(name.encode())
        manifests.append(tmp_path / name)
    printed = subprocess.run(["sha256sum", *manifests], capture_output=True, text=True, check=True).stdout
    listed = tmp_path / "approved"
    listed.write_text(
        f"# reviewed on Monday\n\n{printed.upper().splitlines()[0]}\n{printed.splitlines()[1]} # two\n"
    )
    policy = TrustPolicy.from_files(listed, [])
    assert policy.approves(b"one", {}) and policy.approves(b"two", {})
    assert not policy.approves(b"three", {}) and not policy.is_empty


def test_an_empty_policy_approves_nothing(tmp_path):
    (tmp_path / "empty").write_text("# nothing yet\n")
    for policy in (
        TrustPolicy(),
        TrustPolicy.from_files(None, []),
        TrustPolicy.from_files(tmp_path / "empty", []),
    ):
        assert policy.is_empty and not policy.approves(b"", {})


@pytest.mark.parametrize("line", ["deadbeef", "g" * 64, "a" * 63, "a" * 65, f"{'a' * 64}x", "\\" + "a" * 64])
def test_a_line_that_is_no_digest_is_named(tmp_path, line):
    listed = tmp_path / "approved"
    listed.write_text(f"# comment\n{line}\n")
    with pytest.raises(ConfigError, match=r"VLLM_NEURON_TRUSTED_DIGESTS=.*approved.*line 2"):
        TrustPolicy.from_files(listed, [])


def test_files_that_are_no_public_keys_are_named(tmp_path):
    private, public = key_pair(tmp_path)
    rsa_key = rsa.generate_private_key(65537, 2048).public_key()
    (tmp_path / "rsa.pub").write_bytes(
        rsa_key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / "noise.pub").write_bytes(b"\xff\x00 not PEM")
    assert not TrustPolicy.from_files(None, [public]).is_empty
    for path, said in (
        (private, "holds a private key"),
        (tmp_path / "rsa.pub", "not an ed25519 key"),
        (tmp_path / "noise.pub", "not a public key in PEM"),
        (tmp_path / "absent.pub", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said) as raised:
            TrustPolicy.from_files(None, [public, path])
        assert raised.value.setting == "VLLM_NEURON_TRUSTED_KEYS" and raised.value.value == str(path)


def test_an_encrypted_key_asks_for_its_password(tmp_path):
    locked, _ = key_pair(tmp_path, "locked", b"open sesame")
    plain, _ = key_pair(tmp_path, "plain")
    assert len(Signer.from_pem(locked, lambda: b"open sesame").sign(b"")) == 64

    def never():
        raise AssertionError("asked for the password of a key that has none")

    assert len(Signer.from_pem(plain, never).sign(b"")) == 64
    with pytest.raises(ConfigError, match="encrypted; give its password"):
        Signer.from_pem(locked)
    with pytest.raises(ConfigError, match="does not open it"):
        Signer.from_pem(locked, lambda: b"guess")
    assert b"sesame" not in locked.read_bytes()


def test_files_that_are_no_private_keys_are_named(tmp_path):
    _, public = key_pair(tmp_path)
    for path in (public, tmp_path / "absent.pem"):
        with pytest.raises(ConfigError, match=str(path)):
            Signer.from_pem(path)


def test_a_private_key_is_readable_by_its_owner_only_and_never_overwritten(tmp_path):
    private, public = Signer.generate()
    path = tmp_path / "key.pem"
    write_private_key(path, private)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    signer = Signer.from_pem(path)
    assert signer.key_id == key_id(serialization.load_pem_public_key(public))
    with pytest.raises(CacheError, match=f"{path} cannot be written"):
        write_private_key(path, b"other")
    (tmp_path / "link.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError):
        write_private_key(tmp_path / "link.pem", private)
    assert path.read_bytes() == private and not (tmp_path / "elsewhere").exists()
