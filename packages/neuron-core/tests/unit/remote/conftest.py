# SPDX-License-Identifier: Apache-2.0
"""Remotes the tests reach by other means than the code under test: pathlib for file://, boto3 for s3://."""

import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from neuron_core.graphs.remote import RemoteStore, Signer, TrustPolicy

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


def _write_entry(root, name, files, **facts):
    folder = root / "graphs" / hashlib.sha256(name.encode()).hexdigest()
    described = {}
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        described[path] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    manifest = {
        "key": folder.name,
        "components": {"graph": name},
        "seconds": 1.5,
        **facts,
        "files": described,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))
    (folder / "COMPLETE").write_text(hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest())
    return folder


class FileRemote:
    """A folder on disk."""

    def __init__(self, root):
        self.url = f"file://{root}"
        self.options = {}
        self.root = Path(root)

    def put(self, name, content):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(content)

    def get(self, name):
        return (self.root / name).read_bytes()

    def delete(self, name):
        (self.root / name).unlink()

    def names(self):
        return {p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file()}


class S3Remote:
    """A prefix of a bucket, read and written with boto3."""

    def __init__(self, endpoint, bucket):
        import boto3

        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="AKIAIOSFODNN7EXAMPLE",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        self.bucket = bucket
        self.client.create_bucket(Bucket=bucket)
        self.url = f"s3://{bucket}/graphs"
        self.options = {
            "key": "AKIAIOSFODNN7EXAMPLE",
            "secret": SECRET,
            "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
        }

    def put(self, name, content):
        self.client.put_object(Bucket=self.bucket, Key=f"graphs/{name}", Body=content)

    def get(self, name):
        return self.client.get_object(Bucket=self.bucket, Key=f"graphs/{name}")["Body"].read()

    def delete(self, name):
        self.client.delete_object(Bucket=self.bucket, Key=f"graphs/{name}")

    def names(self):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
        return {key.removeprefix("graphs/") for key in keys}


def _free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _start_s3_server(**environ):
    """moto's server in a process of its own: the S3 protocol over HTTP; returns the process and its URL."""
    port = _free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process, f"http://127.0.0.1:{port}"
        except OSError:
            assert process.poll() is None and time.monotonic() < end, "moto's server did not start"
            time.sleep(0.1)


@pytest.fixture(scope="session")
def s3_endpoint():
    process, url = _start_s3_server()
    yield url
    process.terminate()
    process.wait(timeout=30)


@pytest.fixture
def s3_remote(s3_endpoint):
    return S3Remote(s3_endpoint, f"bucket-{uuid.uuid4().hex[:12]}")


@pytest.fixture(params=["file", "s3"])
def remote(request, tmp_path):
    """A remote of each kind, empty."""
    if request.param == "file":
        return FileRemote(tmp_path / "remote")
    return request.getfixturevalue("s3_remote")


@pytest.fixture
def signer(tmp_path):
    private, _ = Signer.generate()
    path = tmp_path / "signing-key.pem"
    path.write_bytes(private)
    return Signer.from_pem(path)


@pytest.fixture
def trust(signer):
    return TrustPolicy(keys=(signer.public_key,))


@pytest.fixture
def staging(tmp_path):
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


@pytest.fixture
def write_entry(tmp_path):
    """``write_entry(name, {path: bytes}, **facts)``: a complete local entry as the cache writes one."""
    return functools.partial(_write_entry, tmp_path / "cache")


@pytest.fixture
def open_store(remote):
    """``open_store(trust)``: the store at ``remote``."""

    def open_it(trust=None):
        return RemoteStore.open(
            remote.url, trust=trust or TrustPolicy(), timeout_s=30.0, storage_options=remote.options
        )

    return open_it


@pytest.fixture
def entry_files():
    """Reads back what a folder holds, as {path: bytes}; the cache's own sentinel aside."""

    def read(folder):
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name != "COMPLETE"
        }

    return read


@pytest.fixture
def s3_server():
    """``s3_server(**environ)``: the URL of an S3 server of the test's own."""
    started = []

    def start(**environ):
        process, url = _start_s3_server(**environ)
        started.append(process)
        return url

    yield start
    for process in started:
        process.terminate()
        process.wait(timeout=30)
