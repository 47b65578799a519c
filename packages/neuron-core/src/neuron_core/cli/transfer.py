# SPDX-License-Identifier: Apache-2.0
"""Sharing compiled graphs: ``neuron cache push``, ``pull``, ``keygen`` and ``digests``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neuron_core.cli.local import cache_dir_option, chosen, keys_argument, open_cache, open_remote, short
from neuron_core.cli.output import format_bytes, json_option, print_json, progress_bar
from neuron_core.errors import CacheError, ConfigError

if TYPE_CHECKING:
    from neuron_core.graphs.cache import CacheEntry, CompileCache

__all__ = ["digests", "keygen", "pull", "push"]

_MANIFEST = "manifest.json"


def _remote_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--remote",
        metavar="URL",
        help="s3://bucket/graphs, file:///mnt/graphs, …; default: VLLM_NEURON_REMOTE_CACHE.",
    )(function)


@click.command()
@keys_argument
@_remote_option
@click.option(
    "--sign-key",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Private ed25519 key (PEM) to sign with; see keygen.",
)
@cache_dir_option
@json_option
def push(
    keys: tuple[str, ...], remote: str | None, sign_key: Path | None, cache_dir: Path | None, as_json: bool
) -> None:
    """Publish entries in the remote cache.

    All entries, or those named. Whoever reads them must trust your key
    (VLLM_NEURON_TRUSTED_KEYS) or list their digests.

    \b
    Examples:
      neuron cache push --remote s3://team/graphs --sign-key signing.pem
      neuron cache push 9f2c --remote file:///mnt/graphs
    """
    from neuron_core.graphs.remote import Signer

    cache, store = open_cache(cache_dir), open_remote(remote)
    signer = None if sign_key is None else Signer.from_pem(sign_key, _ask_password)
    entries = chosen(cache, keys)
    requests = _requests(cache, entries)
    with progress_bar(hidden=as_json, of_bytes=True) as bar:
        task = bar.add_task("push", total=None)

        def advance(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=f"push {short(name)}")

        report = store.push([entry.path for entry in entries], requests, signer=signer, on_progress=advance)
    if as_json:
        print_json({"remote": store.address, "signed_by": signer and signer.key_id, **asdict(report)})
        return
    click.echo(
        f"{report.pushed} entries and {report.requests_pushed} records pushed to {store.address} "
        f"({format_bytes(report.bytes)}); {report.already_there} entries were there"
    )
    if signer is None:
        click.echo("not signed: who reads them needs their digests (neuron cache digests)")


@click.command()
@_remote_option
@cache_dir_option
@json_option
def pull(remote: str | None, cache_dir: Path | None, as_json: bool) -> None:
    """Bring the approved entries of the remote cache here.

    With them come the records that lead to an entry without tracing. An entry is approved by a
    trusted signature (VLLM_NEURON_TRUSTED_KEYS) or by its digest (VLLM_NEURON_TRUSTED_DIGESTS); others are left out.

    \b
    Example:
      neuron cache pull --remote s3://team/graphs
    """
    store = open_remote(remote)
    cache = open_cache(cache_dir, store, make=True)
    present = {entry.digest for entry in cache.entries()}
    there = [digest for digest, _ in store.digests()]
    missing = [digest for digest in there if digest not in present]
    pulled, num_records = _fetch(cache, missing, [digest for digest, _ in store.request_digests()], as_json)
    if store.off_reason is not None:
        raise CacheError(f"{store.address}: {store.off_reason}")
    facts = {
        "pulled": pulled,
        "already_there": len(there) - len(missing),
        "refused": store.counters.refused,
        "requests": num_records,
        "bytes": store.counters.bytes_downloaded,
    }
    if as_json:
        print_json({"remote": store.address, **facts})
        return
    click.echo(
        f"{pulled} entries and {num_records} records pulled from {store.address} ({format_bytes(facts['bytes'])}); "
        f"{facts['already_there']} entries were there, {facts['refused']} refused"
    )


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--password", is_flag=True, help="Ask for a password to encrypt the private key with.")
@json_option
def keygen(path: Path, password: bool, as_json: bool) -> None:
    """Make a key pair to sign entries with.

    PATH is the private key, to be kept secret; the public key is written beside it.

    \b
    Example:
      neuron cache keygen signing.pem      writes signing.pem and signing.pub.pem
    """
    from neuron_core.graphs.remote import Signer, write_private_key

    public_path = path.with_suffix(f".pub{path.suffix}")
    if public_path.exists():
        raise ConfigError("PATH", str(path), f"{public_path} exists already; choose another name")
    secret = (
        click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True) if password else None
    )
    secret_bytes = secret.encode() if secret else b""
    private, public = Signer.generate(secret_bytes or None)
    write_private_key(path, private)
    public_path.write_bytes(public)
    identity = Signer.from_pem(path, lambda: secret_bytes).key_id
    if as_json:
        print_json({"private": str(path), "public": str(public_path), "key_id": identity})
        return
    click.echo(f"private key {path}: sign with it, neuron cache push --sign-key {path}")
    click.echo(f"public key {public_path} ({identity}): trust it, VLLM_NEURON_TRUSTED_KEYS={public_path}")


@click.command()
@keys_argument
@cache_dir_option
@json_option
def digests(keys: tuple[str, ...], cache_dir: Path | None, as_json: bool) -> None:
    """Print the digests of entries, for a list of approved ones.

    They are the SHA-256 of manifests and of the records that lead to an entry. The lines
    are the list that VLLM_NEURON_TRUSTED_DIGESTS names; an entry is verified before it
    is listed.

    \b
    Example:
      neuron cache digests > approved.txt
    """
    from neuron_core.graphs.remote import request_document

    cache = open_cache(cache_dir)
    entries = chosen(cache, keys)
    for entry in entries:
        cache.verify(entry.digest)
    manifests = {entry.digest: _sha256((entry.path / _MANIFEST).read_bytes()) for entry in entries}
    records = {
        digest: _sha256(request_document(digest, record))
        for digest, record in _requests(cache, entries).items()
    }
    if as_json:
        print_json({"entries": manifests, "requests": records})
        return
    for kind, listed in (("entry", manifests), ("request", records)):
        for digest, approved in listed.items():
            click.echo(f"{approved}  {kind} {digest}")


def _fetch(cache: CompileCache, entries: list[str], records: list[str], hidden: bool) -> tuple[int, int]:
    """How many entries and how many records the remote gave."""
    num_entries = num_records = 0
    with progress_bar(hidden=hidden) as bar:
        for digest in bar.track(entries, description="entries"):
            num_entries += cache.find(digest) is not None
        for digest in bar.track(records, description="records"):
            num_records += cache.get_request(digest) is not None
    return num_entries, num_records


def _requests(cache: CompileCache, entries: list[CacheEntry]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        found |= cache.requests_of(entry.digest)
    return found


def _ask_password() -> bytes:
    password: str = click.prompt("Password of the signing key", hide_input=True, err=True)
    return password.encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
