# SPDX-License-Identifier: Apache-2.0
"""`neuron cache push`, `pull`, `keygen`, `digests`: what one machine compiled, another loads if it is approved."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from neuron_core.cli.main import neuron
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.key import GraphKey

BUILD = """
import json, sys
from types import SimpleNamespace
import torch
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.program import Part, Program

cache = CompileCache(sys.argv[1])
device = SimpleNamespace(name="cpu", torch_device=torch.device("cpu"))
builder = GraphBuilder(device, FxCompiler(), cache, require_compiled=len(sys.argv) > 2)
program = Program((Part("layer", torch.nn.Linear(4, 4), ("x",), ("x",)),), ("x",))
for rows in (2, 3):
    builder.build(program, {"x": ((rows, 4), torch.float32)}, bucket=f"decode_b{rows}")
stats = builder.stats
print(json.dumps([stats.captured, stats.compiled, stats.loaded, cache.counters.hits]))
"""


def build(root: Path, *, require_compiled: bool = False) -> list[int]:
    """In a process of its own: graphs captured, compiled, loaded, and hits in the cache."""
    command = [sys.executable, "-c", BUILD, str(root), *(["require"] if require_compiled else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("here") / "cache"
    assert build(root) == [2, 2, 0, 0]
    return root


def invoke(*arguments: object, **variables: object) -> Result:
    env = {name: str(value) for name, value in variables.items()}
    return CliRunner().invoke(neuron, ["cache", *map(str, arguments)], env=env)


def read_json(*arguments: object, **variables: object) -> dict:
    done = invoke(*arguments, "--json", **variables)
    assert done.exit_code == 0, done.output + done.stderr
    return json.loads(done.stdout)


def keys_in(root: Path) -> set[str]:
    return {path.parent.name for path in root.glob("graphs/*/COMPLETE")}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    assert invoke("keygen", tmp_path / "signing.pem").exit_code == 0
    return tmp_path / "signing.pem", tmp_path / "signing.pub.pem"


def test_what_was_signed_and_pushed_is_pulled_and_starts_another_machine_without_capture(
    compiled: Path, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    remote = f"file://{tmp_path / 'remote'}"
    private, public = pair
    pushed = read_json("push", "--remote", remote, "--sign-key", private, "--cache-dir", compiled)
    assert (pushed["pushed"], pushed["already_there"], pushed["requests_pushed"]) == (2, 0, 2)
    there = tmp_path / "there"
    trusting = {"VLLM_NEURON_TRUSTED_KEYS": public, "VLLM_NEURON_REMOTE_CACHE": remote}
    pulled = read_json("pull", "--cache-dir", there, **trusting)
    assert (pulled["pulled"], pulled["requests"], pulled["refused"]) == (2, 2, 0)
    assert keys_in(there) == keys_in(compiled)
    assert invoke("verify", "--cache-dir", there).exit_code == 0
    assert build(there, require_compiled=True) == [0, 0, 2, 2]
    again = read_json("pull", "--cache-dir", there, **trusting)
    assert (again["pulled"], again["already_there"]) == (0, 2)
    again = read_json("push", "--remote", remote, "--sign-key", private, "--cache-dir", compiled)
    assert (again["pushed"], again["already_there"], again["bytes"]) == (0, 2, 0)


def test_nothing_is_pulled_from_whom_nobody_trusts(
    compiled: Path, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    remote = f"file://{tmp_path / 'remote'}"
    read_json("push", "--remote", remote, "--sign-key", pair[0], "--cache-dir", compiled)
    assert invoke("keygen", tmp_path / "other.pem").exit_code == 0
    for trusted in ({}, {"VLLM_NEURON_TRUSTED_KEYS": tmp_path / "other.pub.pem"}):
        pulled = read_json("pull", "--remote", remote, "--cache-dir", tmp_path / "there", **trusted)
        assert pulled["pulled"] == pulled["requests"] == 0 and pulled["refused"] == 4
    assert keys_in(tmp_path / "there") == set()


def test_the_printed_digests_approve_exactly_what_they_were_printed_for(
    compiled: Path, tmp_path: Path
) -> None:
    remote = f"file://{tmp_path / 'remote'}"
    read_json("push", "--remote", remote, "--cache-dir", compiled)
    first, second = sorted(keys_in(compiled))
    listed = invoke("digests", first[:16], "--cache-dir", compiled)
    assert listed.exit_code == 0
    manifest = (compiled / "graphs" / first / "manifest.json").read_bytes()
    assert f"{hashlib.sha256(manifest).hexdigest()}  entry {first}" in listed.stdout.splitlines()
    assert second not in listed.stdout
    (tmp_path / "approved.txt").write_text(listed.stdout)
    pulled = read_json(
        "pull",
        "--remote",
        remote,
        "--cache-dir",
        tmp_path / "there",
        VLLM_NEURON_TRUSTED_DIGESTS=tmp_path / "approved.txt",
    )
    assert (pulled["pulled"], pulled["requests"], pulled["refused"]) == (1, 1, 2)
    assert keys_in(tmp_path / "there") == {first}


def test_a_push_may_name_entries_and_says_who_signed(
    compiled: Path, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    key = min(keys_in(compiled))
    arguments = ("push", key[:12], "--remote", f"file://{tmp_path / 'remote'}", "--cache-dir", compiled)
    assert "not signed" in invoke(*arguments).stdout
    signed = read_json(*arguments, "--sign-key", pair[0])
    assert signed["pushed"] == 1 and len(signed["signed_by"]) == 16


def test_a_damaged_entry_is_neither_pushed_nor_approved(compiled: Path, tmp_path: Path) -> None:
    CompileCache(tmp_path / "cache").get_or_compile(GraphKey.of({"graph": "x"}), _artifact)
    (file,) = (tmp_path / "cache").glob("graphs/*/artifact.bin")
    file.write_bytes(b"other")
    for command in (("push", "--remote", f"file://{tmp_path / 'remote'}"), ("digests",)):
        done = invoke(*command, "--cache-dir", tmp_path / "cache")
        assert done.exit_code == 1 and "artifact.bin" in done.stderr
        assert done.stdout == ""


def _artifact(staging: Path) -> dict[str, str]:
    (staging / "artifact.bin").write_bytes(b"code!")
    return {}


def test_a_command_without_a_remote_says_how_to_name_one(compiled: Path) -> None:
    for command in ("push", "pull"):
        done = invoke(command, "--cache-dir", compiled)
        assert done.exit_code == 2 and "VLLM_NEURON_REMOTE_CACHE" in done.stderr


def test_a_remote_that_cannot_be_reached_is_an_error_of_the_command(compiled: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remote = f"file://{tmp_path / 'file' / 'below'}"
    done = invoke("push", "--remote", remote, "--cache-dir", compiled)
    assert done.exit_code == 1 and done.stderr.startswith("Error: ")


def test_credentials_in_an_address_are_never_printed(compiled: Path) -> None:
    done = invoke("push", "--remote", "file://someone:secret-word@host/graphs", "--cache-dir", compiled)
    assert done.exit_code == 1
    assert "secret-word" not in done.output + done.stderr


def test_keygen_writes_a_private_key_for_its_owner_only_and_overwrites_nothing(tmp_path: Path) -> None:
    report = read_json("keygen", tmp_path / "signing.pem")
    private, public = Path(report["private"]), Path(report["public"])
    assert public == tmp_path / "signing.pub.pem"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    before = private.read_bytes()
    done = invoke("keygen", private)
    assert done.exit_code == 1 and "exists" in done.stderr
    public.unlink()
    assert invoke("keygen", private).exit_code == 1
    assert private.read_bytes() == before


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is what the keys are compared with")
def test_the_public_key_is_the_one_openssl_derives(tmp_path: Path) -> None:
    report = read_json("keygen", tmp_path / "signing.pem")
    private, public = Path(report["private"]), Path(report["public"])
    command = ["openssl", "pkey", "-in", str(private), "-pubout"]
    derived = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert derived == public.read_text()
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", str(public), "-outform", "DER"], capture_output=True, check=True
    ).stdout
    assert hashlib.sha256(der[-32:]).hexdigest()[:16] == report["key_id"]


def test_an_encrypted_key_is_asked_for_its_password(compiled: Path, tmp_path: Path) -> None:
    made = CliRunner().invoke(
        neuron, ["cache", "keygen", str(tmp_path / "k.pem"), "--password"], input="word\nword\n"
    )
    assert made.exit_code == 0 and b"ENCRYPTED" in (tmp_path / "k.pem").read_bytes()
    arguments = ["cache", "push", "--remote", f"file://{tmp_path / 'r'}", "--cache-dir", str(compiled)]
    arguments += ["--sign-key", str(tmp_path / "k.pem"), "--json"]
    assert CliRunner().invoke(neuron, arguments, input="wrong\n").exit_code == 1
    done = CliRunner().invoke(neuron, arguments, input="word\n")
    assert done.exit_code == 0 and json.loads(done.stdout)["pushed"] == 2


def test_a_pushed_progress_and_a_terminal_s_colours_do_not_reach_json(compiled: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "neuron_core.cli", "cache", "push", "--json"]
    command += ["--remote", f"file://{tmp_path / 'remote'}", "--cache-dir", str(compiled)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "FORCE_COLOR": "1"},
        timeout=120,
    )
    assert json.loads(done.stdout)["pushed"] == 2
