# SPDX-License-Identifier: Apache-2.0
"""An address is checked before anything is contacted, and shown without its credentials."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_core.errors import ConfigError
from neuron_core.graphs.remote import Address, RemoteStore, TrustPolicy, redact

SECRET = "s3cr/et+Key@1"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/graphs", "s3://bucket/graphs"),
        ("ftp://me:pass@host/graphs", "ftp://***@host/graphs"),
        ("ftp://me:pa/ss@wo@host/graphs", "ftp://***@host/graphs"),
        ("me:pass@host/graphs", "***@host/graphs"),
        ("https://host/x?sig=abc&se=1#f", "https://host/x?***"),
        ("ftp://me:pa ss@host/graphs", "ftp://***@host/graphs"),
        ("https://x@a://b@c", "***@c"),
    ],
)
def test_redaction(url, shown):
    assert redact(url) == shown


def test_addresses_in_other_libraries_messages_are_redacted():
    said = "cannot reach 'https://u:p@h:1/b?X-Amz-Signature=1' (x)? me:pass@host, who? me"
    assert (
        Address.parse("memory://x").scrub(said)
        == "cannot reach 'https://***@h:1/b?*** (x)? ***@host, who? me"
    )


@given(st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S")), min_size=6))
def test_a_password_of_any_characters_is_not_shown(password):
    url = f"ftp://user:Q{password}Q@host/graphs"
    assert f"Q{password}Q" not in redact(url)
    try:
        address = Address.parse(url)
    except ConfigError as error:
        assert f"Q{password}Q" not in str(error) and f"Q{password}Q" not in repr(error.args)
    else:
        assert f"Q{password}Q" not in repr(address) + address.scrub(f"cannot log in with Q{password}Q")


def test_options_are_scrubbed_from_other_libraries_messages():
    options = {"secret": SECRET, "client_kwargs": {"token": ["nested-token"], "pin": 918273}, "anon": False}
    address = Address.parse("memory://graphs", options)
    said = address.scrub(
        f"403 for {SECRET}, s3cr%2Fet%2BKey%401, nested-token\n and 918273; anon False" + "x" * 999
    )
    for secret in (SECRET, "s3cr", "nested-token", "918273"):
        assert secret not in said
    assert "403 for ***" in said and "\n" not in said and len(said) < 400
    assert SECRET not in repr(address)


def test_a_short_user_name_does_not_spoil_messages():
    address = Address.parse("ftp://me:p4@host/graphs")
    assert (
        address.scrub("timed out; the name me with p4 at home") == "timed out; the name *** with *** at home"
    )


@pytest.mark.parametrize(
    "url", ["file:///mnt/graphs", "/mnt/graphs/", "file:///mnt/graphs/ ", "local:///mnt/graphs"]
)
def test_a_folder_may_be_written_in_several_ways(url):
    assert Address.parse(url).path("entries", "a.json") == "/mnt/graphs/entries/a.json"


def test_an_object_stores_address_is_bucket_and_prefix():
    address = Address.parse("s3://bucket/models/graphs/")
    assert (address.protocol, address.path("objects")) == ("s3", "bucket/models/graphs/objects")


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("", "is not one address"),
        ("graphs", "is not one address"),
        ("./graphs", "is not one address"),
        ("simplecache::s3://bucket", "is not one address"),
        ("s4://bucket/graphs", "fsspec knows no filesystem s4://"),
        ("s3://", "names no absolute folder"),
        ("file:///", "names no absolute folder"),
        ("file://graphs", "names no absolute folder"),
        ("file://../graphs", "names no absolute folder"),
        ("s3://bucket/graphs?endpoint=https://x", "has a query string"),
        ("s3://AKIA:abc/def@bucket/graphs", "takes no credentials in the address"),
        ("ftp://me:abc/def@host/graphs", "percent-encode"),
        ("s3://AKIA:abc@bucket/graphs", "takes no credentials in the address"),
    ],
)
def test_an_address_that_cannot_work_is_refused_with_one_that_can(url, hint):
    with pytest.raises(ConfigError, match=hint) as raised:
        RemoteStore.open(url, trust=TrustPolicy())
    assert raised.value.setting == "VLLM_NEURON_REMOTE_CACHE" and raised.value.value == redact(url)
    assert "abc" not in str(raised.value) and "abc" not in str(pickle.loads(pickle.dumps(raised.value)))


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_wait_that_is_no_bound_is_refused(timeout_s):
    with pytest.raises(ConfigError, match="VLLM_NEURON_REMOTE_TIMEOUT"):
        RemoteStore.open("file:///mnt/graphs", trust=TrustPolicy(), timeout_s=timeout_s)


def test_a_scheme_without_its_package_names_the_wheel():
    """In a process of its own, where neither package can be imported."""
    script = """
import sys
sys.modules["s3fs"] = sys.modules["gcsfs"] = None
from neuron_core.errors import ConfigError
from neuron_core.graphs.remote import RemoteStore, TrustPolicy
for url in ("s3://bucket/graphs", "gs://user:secret@bucket/graphs"):
    try:
        RemoteStore.open(url, trust=TrustPolicy())
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    s3, gs = done.stdout.splitlines()
    assert "s3fs" in s3 and "neuron-core[s3]" in s3
    assert "gcsfs" in gs and "secret" not in gs
