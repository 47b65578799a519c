# SPDX-License-Identifier: Apache-2.0
"""A remote out of reach costs one bounded wait and one warning, and never a secret in a message."""

import contextlib
import hashlib
import http.server
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
import traceback

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from neuron_core.errors import CacheError
from neuron_core.graphs.remote import RemoteStore, TrustPolicy

DIGESTS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(20)]
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = "FwoGZXIvYXdzEXAMPLETOKEN"
WAIT_S = 1.0


def open_s3(endpoint, trust=None, timeout_s=WAIT_S, bucket="bucket"):
    options = {
        "key": "AKIAIOSFODNN7EXAMPLE",
        "secret": SECRET,
        "token": TOKEN,
        "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
    }
    return RemoteStore.open(
        f"s3://{bucket}/graphs", trust=trust or TrustPolicy(), timeout_s=timeout_s, storage_options=options
    )


@contextlib.contextmanager
def silent_server():
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(server.accept())

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def failing_server(status):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_PUT = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def warnings_of(caplog):
    ours = [record for record in caplog.records if record.name.startswith("neuron_core")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("server", "wait_s", "reason"),
    [
        (closed_port, 20.0, "EndpointConnectionError"),
        (silent_server, 1.0, "no answer within 1 s|TimeoutError"),
        (lambda: failing_server(500), 20.0, "500"),
        (lambda: failing_server(503), 20.0, "503"),
        (lambda: failing_server(403), 20.0, "403"),
    ],
    ids=["closed", "silent", "500", "503", "403"],
)
def test_it_costs_one_wait_and_one_warning(server, wait_s, reason, staging, caplog):
    with server() as endpoint:
        store = open_s3(endpoint, timeout_s=wait_s)
        start = time.monotonic()
        assert not any(store.fetch(digest, staging) for digest in DIGESTS)
        assert [store.fetch_request(digest) for digest in DIGESTS] == [None] * len(DIGESTS)
        assert time.monotonic() - start < wait_s + 10  # forty waits of one second would take forty
        (warning,) = warnings_of(caplog)
        assert "s3://bucket/graphs is off" in warning and re.search(reason, warning), warning
        assert store.counters.hits == store.counters.misses == store.counters.refused == 0


def test_threads_that_wait_together_are_released_together(staging, caplog):
    with silent_server() as endpoint:
        store = open_s3(endpoint, timeout_s=2.5)
        start = time.monotonic()

        def ask(number):
            time.sleep(number * 0.2)
            assert store.fetch_request(DIGESTS[number]) is None

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        # The last asked 1.8 s after the first; on its own it would have waited until 4.3 s.
        assert time.monotonic() - start < 4.1
        assert len(warnings_of(caplog)) == 1


def test_it_is_off_for_every_store_of_the_process_at_that_address(caplog):
    with closed_port() as endpoint:
        assert open_s3(endpoint).fetch_request(DIGESTS[0]) is None
        again = open_s3(endpoint)
        assert again.off_reason is not None and again.fetch_request(DIGESTS[0]) is None
        assert len(warnings_of(caplog)) == 1
        assert open_s3(endpoint, bucket="other").off_reason is None


def test_a_bucket_that_does_not_exist_is_not_taken_for_an_empty_one(s3_endpoint, caplog):
    store = open_s3(s3_endpoint, timeout_s=30.0, bucket="misspelt")
    assert store.fetch_request(DIGESTS[0]) is None
    (warning,) = warnings_of(caplog)
    assert "NoSuchBucket" in warning


def test_denied_access_is_said_and_commands_raise(s3_server, write_entry, caplog):
    """moto checks keys and policies here; ours exist nowhere."""
    store = open_s3(s3_server(INITIAL_NO_AUTH_ACTION_COUNT="0"), timeout_s=30.0)
    assert store.fetch_request(DIGESTS[0]) is None
    (warning,) = warnings_of(caplog)
    assert "InvalidAccessKeyId" in warning
    for command in (
        store.digests,
        store.request_digests,
        lambda: store.push([write_entry("x", {"f": b"1"})], {}),
    ):
        with pytest.raises(CacheError, match=r"s3://bucket/graphs is off: .*InvalidAccessKeyId"):
            command()


class HostileFileSystem(MemoryFileSystem):
    """Puts what it knows into its errors, as a library with a bad day would."""

    protocol = "hostile"
    cachable = False

    def __init__(self, **options):
        super().__init__(**{"skip_instance_cache": True})
        self.options = options

    def cat_file(self, path, start=None, end=None, **kwargs):
        try:
            raise ValueError(f"inner {self.options}")
        except ValueError as error:
            raise RuntimeError(
                f"cannot open https://me:{self.options['password']}@host/x?sig={self.options['token']} {self.options}"
            ) from error

    info = pipe_file = put_file = cat_file


fsspec.register_implementation("hostile", HostileFileSystem, clobber=True)


def test_no_secret_is_in_any_log_record_or_error(write_entry, staging, caplog):
    """Every logger at its most talkative, tracebacks included."""
    caplog.set_level(0)
    logging.getLogger().setLevel(0)
    texts = []
    hostile = RemoteStore.open(
        "hostile://place/graphs",
        trust=TrustPolicy(),
        storage_options={"password": "pa ss%w0rd", "token": TOKEN, "nested": {"secret": SECRET}},
    )
    in_url = "ftp://me:pa%20ss%25w0rd@127.0.0.1:1/graphs"
    with closed_port() as endpoint:
        for store in (
            hostile,
            open_s3(endpoint),
            RemoteStore.open(in_url, trust=TrustPolicy(), timeout_s=WAIT_S),
        ):
            assert not store.fetch(DIGESTS[0], staging)
            with pytest.raises(CacheError) as raised:
                store.push([write_entry("layer", {"f": b"1"})], {})
            texts += [format_error(raised.value), repr(store.__dict__), store.address, str(store.off_reason)]
    formatter = logging.Formatter()
    texts += [formatter.format(record) + repr(record.args) for record in caplog.records]
    assert any("hostile" in text for text in texts) and len(warnings_of(caplog)) == 3
    for secret in (SECRET, TOKEN, "pa ss%w0rd", "pa%20ss", "w0rd"):
        assert [text for text in texts if secret in text] == []


def format_error(error):
    return "".join(traceback.format_exception(error)) + repr(error.args)


EXIT_SCRIPT = """
import logging, socket, sys, time, fsspec
from fsspec.implementations.memory import MemoryFileSystem
from neuron_core.graphs.remote import RemoteStore, TrustPolicy

class Stuck(MemoryFileSystem):
    protocol = "stuck"
    def cat_file(self, path, start=None, end=None, **kwargs):
        time.sleep(600)

fsspec.register_implementation("stuck", Stuck)
logging.basicConfig(level=logging.WARNING, format="%(message)s")
if sys.argv[2:] and "storage" in sys.argv[2]:
    socket.getaddrinfo = lambda *arguments, **options: time.sleep(600)
options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": sys.argv[2]}} if sys.argv[2:] else {}
store = RemoteStore.open(sys.argv[1], trust=TrustPolicy(), timeout_s=1.0, storage_options=options)
assert store.fetch_request("a" * 64) is None
assert store.fetch_request("b" * 64) is None
print("done", flush=True)
"""


@pytest.mark.parametrize("kind", ["stuck", "s3", "lookup"])
def test_the_process_ends_although_a_thread_is_stuck(kind):
    with silent_server() as endpoint:
        arguments = {
            "stuck": ["stuck://place"],
            "s3": ["s3://bucket/graphs", endpoint],
            "lookup": ["s3://bucket/graphs", "http://storage.example:9000"],
        }[kind]
        done = subprocess.run(
            [sys.executable, "-c", EXIT_SCRIPT, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr.count("is off for this process") == 1


def test_a_child_process_makes_its_own_connection(s3_remote, write_entry, tmp_path):
    """fsspec's S3 client does not survive a fork; ours is made again."""
    script = """
import os, sys, json
from neuron_core.graphs.remote import RemoteStore, TrustPolicy
url, options = json.loads(sys.argv[1])
store = RemoteStore.open(url, trust=TrustPolicy(), timeout_s=30.0, storage_options=options)
assert store.digests() == []
child = os.fork()
if child == 0:
    os._exit(0 if store.digests() == [] else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps([s3_remote.url, s3_remote.options])],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
