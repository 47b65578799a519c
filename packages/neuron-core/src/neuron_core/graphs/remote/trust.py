# SPDX-License-Identifier: Apache-2.0
"""Who may put native code into this process: the operator's list of digests and ed25519 keys."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from neuron_core.errors import CacheError, ConfigError

__all__ = ["Signer", "TrustPolicy", "key_id", "write_private_key"]

DIGESTS_SETTING = "VLLM_NEURON_TRUSTED_DIGESTS"
KEYS_SETTING = "VLLM_NEURON_TRUSTED_KEYS"
_DIGEST_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64})(\s+\S.*)?")
_UNREADABLE = (ValueError, TypeError)


def key_id(key: Ed25519PublicKey) -> str:
    """The first 16 hex digits of the SHA-256 of the raw public key (32 bytes)."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


@dataclass(frozen=True)
class TrustPolicy:
    """What the operator approves: SHA-256 digests of documents, and keys whose signature approves one.

    A document is a manifest or a request record, byte for byte. An empty policy approves nothing.
    """

    digests: frozenset[str] = frozenset()
    keys: tuple[Ed25519PublicKey, ...] = ()

    @classmethod
    def from_files(cls, digest_list: Path | None, public_keys: Sequence[Path]) -> TrustPolicy:
        """Read a list of digests (one a line, as ``sha256sum`` prints them; ``#`` comments) and PEM keys.

        Raises ``ConfigError`` naming the file, and the line, for anything that is not one.
        """
        digests = frozenset() if digest_list is None else _read_digests(digest_list)
        return cls(digests, tuple(_read_public_key(path) for path in public_keys))

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be approved."""
        return not self.digests and not self.keys

    def approves(self, document: bytes, signatures: Mapping[str, bytes]) -> bool:
        """Whether the list holds the document's SHA-256, or a trusted key signed exactly these bytes.

        ``signatures`` maps key ids to ed25519 signatures (RFC 8032, 64 bytes); unknown keys are ignored.
        """
        if hashlib.sha256(document).hexdigest() in self.digests:
            return True
        return any(_is_signed_by(key, document, signatures) for key in self.keys)


class Signer:
    """An ed25519 private key that signs documents for others to trust."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key()
        self.key_id = key_id(self.public_key)

    @classmethod
    def from_pem(cls, path: Path, password: Callable[[], bytes] | None = None) -> Signer:
        """Read a private key; ``password`` is asked only if the file is encrypted.

        Raises ``ConfigError`` naming the file when it is not an ed25519 private key or stays locked.
        """
        content = _read(path, "signing key")
        try:
            key: object = serialization.load_pem_private_key(content, None)
        except TypeError:
            key = _unlock(path, content, password)
        except ValueError as error:
            raise ConfigError("signing key", str(path), _NOT_PRIVATE) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError("signing key", str(path), _NOT_PRIVATE)
        return cls(key)

    @staticmethod
    def generate(password: bytes | None = None) -> tuple[bytes, bytes]:
        """A new key pair as PEM: (private, public); the private one is encrypted if there is a password."""
        key = Ed25519PrivateKey.generate()
        encryption = (
            serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        )
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return private, public

    def sign(self, document: bytes) -> bytes:
        """The signature (RFC 8032, 64 bytes) over exactly these bytes."""
        return self._key.sign(document)

    def has_signed(self, document: bytes, signatures: Mapping[str, bytes]) -> bool:
        """Whether this key's valid signature is among them."""
        return _is_signed_by(self.public_key, document, signatures)


def write_private_key(path: Path, pem: bytes) -> None:
    """Write a private key that only its owner may read (mode 0600).

    Raises ``CacheError`` if the file exists: a key that signed entries is never overwritten.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(pem)
    except OSError as error:
        raise CacheError(
            f"{path} cannot be written: {error.strerror}; name a file that does not exist"
        ) from error


_NOT_PRIVATE = "is not an ed25519 private key in PEM; `neuron cache keygen` writes one"


def _is_signed_by(key: Ed25519PublicKey, document: bytes, signatures: Mapping[str, bytes]) -> bool:
    signature = signatures.get(key_id(key))
    if signature is None:
        return False
    try:
        key.verify(signature, document)
    except InvalidSignature:
        return False
    return True


def _unlock(path: Path, content: bytes, password: Callable[[], bytes] | None) -> object:
    if password is None:
        raise ConfigError("signing key", str(path), "is encrypted; give its password")
    try:
        return serialization.load_pem_private_key(content, password())
    except _UNREADABLE as error:
        raise ConfigError(
            "signing key", str(path), "is encrypted and the password does not open it"
        ) from error


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        hint = f"cannot be read ({error.strerror}); name a file this user can read"
        raise ConfigError(setting, str(path), hint) from error


def _read_digests(path: Path) -> frozenset[str]:
    digests = set()
    for number, line in enumerate(
        _read(path, DIGESTS_SETTING).decode(errors="replace").splitlines(), start=1
    ):
        content = line.partition("#")[0].strip()
        match = _DIGEST_LINE.fullmatch(content)
        if match:
            digests.add(match["digest"].lower())
        elif content:
            hint = (
                f"line {number} does not start with a SHA-256 (64 hex digits); `sha256sum` prints such lines"
            )
            raise ConfigError(DIGESTS_SETTING, str(path), hint)
    return frozenset(digests)


def _read_public_key(path: Path) -> Ed25519PublicKey:
    content = _read(path, KEYS_SETTING)
    if b"PRIVATE KEY" in content:
        raise ConfigError(KEYS_SETTING, str(path), "holds a private key; name the public one here")
    try:
        key = serialization.load_pem_public_key(content)
    except _UNREADABLE as error:
        hint = "is not a public key in PEM; `neuron cache keygen` writes one"
        raise ConfigError(KEYS_SETTING, str(path), hint) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(KEYS_SETTING, str(path), "is not an ed25519 key; `neuron cache keygen` writes one")
    return key
