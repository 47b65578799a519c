# SPDX-License-Identifier: Apache-2.0
"""Memory, compiler, cache folder, entries, failures and the remote cache, each with a condition that is real."""

import collections
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from neuron_core.devices.host import Host
from neuron_core.doctor import cache_folder, memory
from neuron_core.doctor.cache_folder import check_cache_folder, check_file_system, filesystem_type
from neuron_core.doctor.check import Status
from neuron_core.doctor.compilers import check_cpp_compiler, check_neuron_compiler
from neuron_core.doctor.entries import check_entries, check_failures
from neuron_core.doctor.machine import Machine
from neuron_core.doctor.memory import check_compile_memory
from neuron_core.doctor.remote import check_remote
from neuron_core.doctor.settings import read_settings
from neuron_core.errors import CompileError
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.key import GraphKey

GIB = 1024**3
Mount = collections.namedtuple("Mount", ["mountpoint", "fstype"])


def machine(tmp_path: Path, instance: str = "", **variables: str) -> Machine:
    variables = {"VLLM_NEURON_CACHE_DIR": str(tmp_path / "cache"), **variables}
    environment, errors = read_settings(variables)
    assert not errors
    dmi = tmp_path / "sys/devices/virtual/dmi/id"
    dmi.mkdir(parents=True, exist_ok=True)
    (dmi / "product_name").write_text(instance)
    return Machine(environment, variables, tmp_path / "dev", tmp_path / "sys")


def host_with(tmp_path: Path, free: int, cpus: int) -> Host:
    """A host whose kernel says so."""
    proc = tmp_path / "proc"
    proc.mkdir(exist_ok=True)
    (proc / "meminfo").write_text(f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {free // 1024} kB\n")
    return Host(proc=proc, sys=tmp_path / "none", allowed=frozenset(range(cpus)))


def test_a_host_that_is_too_small_for_its_compiles_is_told_how_many_fit(tmp_path: Path) -> None:
    small = host_with(tmp_path, 30 * GIB, cpus=8)
    finding = check_compile_memory(None, for_neuron=True, host=small)
    assert finding.status is Status.WARN
    assert finding.details["fitting"] == 30 * GIB // memory.NEURON_COMPILE_BYTES == 3
    assert "VLLM_NEURON_COMPILE_JOBS=3" in finding.advice
    followed = check_compile_memory(3, for_neuron=True, host=small)
    assert followed.status is Status.OK
    assert check_compile_memory(None, for_neuron=False, host=small).status is Status.OK


def test_a_host_without_memory_for_one_compile_is_sent_elsewhere(tmp_path: Path) -> None:
    finding = check_compile_memory(1, for_neuron=True, host=host_with(tmp_path, 4 * GIB, cpus=2))
    assert finding.status is Status.WARN and "neuron cache push" in finding.advice
    assert "COMPILE_JOBS" not in finding.advice


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler itself is what is looked at")
def test_the_compiler_of_this_host_is_tried_out() -> None:
    finding = check_cpp_compiler(needed=True)
    said = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    assert finding.status is Status.OK and finding.found == said.splitlines()[0]


def test_a_missing_compiler_fails_only_where_the_cpu_device_needs_it() -> None:
    assert check_cpp_compiler(needed=True, compiler="no-such-g++").status is Status.FAIL
    assert check_cpp_compiler(needed=False, compiler="no-such-g++").status is Status.INFO


def test_a_compiler_that_cannot_build_is_not_taken_for_one(tmp_path: Path) -> None:
    """One that is there and answers, as in an image without headers."""
    compiler = tmp_path / "g++-broken"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 'g++ 12' && exit 0\n"
        "echo 'probe.cpp:1:10: fatal error: Python.h: No such file or directory' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    finding = check_cpp_compiler(needed=True, compiler=str(compiler))
    assert finding.status is Status.FAIL
    assert "Python.h" in finding.found and "python3-dev" in finding.advice


@pytest.mark.parametrize(
    ("body", "status", "found"),
    [
        ("echo 'NeuronX Compiler version 2.27.5334.0+1f2e'", "ok", "2.27.5334.0"),
        ("echo 'this is a placeholder' >&2; exit 1", "fail", "not the real compiler"),
    ],
)
def test_the_program_of_the_neuron_compiler_is_asked_for_its_version(
    tmp_path: Path, body: str, status: str, found: str
) -> None:
    program = tmp_path / "neuronx-cc"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    wanting = machine(tmp_path, NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    (finding,) = check_neuron_compiler(wanting, str(program))
    assert str(finding.status) == status and found in finding.found
    (finding,) = check_neuron_compiler(wanting, str(tmp_path / "none"))
    assert finding.status is Status.FAIL and "not installed" in finding.found
    assert check_neuron_compiler(machine(tmp_path), str(tmp_path / "none")) == []


def test_a_cache_folder_that_can_be_written_is_not_made_by_looking(tmp_path: Path) -> None:
    (finding,) = check_cache_folder(machine(tmp_path).environment)
    assert finding.status in (Status.OK, Status.WARN) and "not made yet" in finding.found
    assert not (tmp_path / "cache").exists()
    assert finding.details["free_bytes"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free, abs=GIB)


def read_only_place(tmp_path: Path) -> Path:
    """A folder nobody can write into: even root cannot add to the kernel's own."""
    if os.geteuid() == 0:
        return Path("/proc/self")
    (tmp_path / "ro").mkdir(mode=0o555)
    return tmp_path / "ro"


def test_a_read_only_cache_is_a_failure(tmp_path: Path) -> None:
    place = read_only_place(tmp_path)
    (finding,) = check_cache_folder(machine(tmp_path, VLLM_NEURON_CACHE_DIR=str(place / "cache")).environment)
    assert finding.status is Status.FAIL and str(place) in finding.found
    assert "VLLM_NEURON_CACHE_DIR" in finding.advice


def test_a_read_only_cache_that_is_complete_and_required_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CompileCache(tmp_path / "cache").get_or_compile(GraphKey.of({"graph": "x"}), _artifact)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache_folder.tempfile, "NamedTemporaryFile", refuse)
    sealed = machine(tmp_path, VLLM_NEURON_REQUIRE_COMPILED="1").environment
    assert check_cache_folder(sealed)[0].status is Status.OK
    assert check_cache_folder(machine(tmp_path).environment)[0].status is Status.FAIL


@pytest.mark.parametrize(("free", "status"), [(100 * GIB, "ok"), (GIB, "warn"), (GIB // 100, "fail")])
def test_little_room_is_a_warning_and_none_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(cache_folder.shutil, "disk_usage", lambda path: usage)
    (finding,) = check_cache_folder(machine(tmp_path).environment)
    assert str(finding.status) == status
    assert (status == "ok") == (finding.advice == "")


def test_the_type_of_a_file_system_is_what_stat_says() -> None:
    mounts = psutil.disk_partitions(all=True)
    for path in (Path("/proc/self"), Path("/dev/shm"), Path("/sys")):
        if path.exists():
            command = ["stat", "--file-system", "--format=%T", str(path)]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            assert filesystem_type(path, mounts) == said


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.s3fs", "9p"])
def test_a_cache_on_a_network_file_system_is_a_warning(tmp_path: Path, kind: str) -> None:
    mounts = [Mount("/", "ext4"), Mount(str(tmp_path), kind)]
    (finding,) = check_file_system(machine(tmp_path).environment, mounts)
    assert finding.status is Status.WARN and kind in finding.found
    assert "VLLM_NEURON_REMOTE_CACHE" in finding.advice


def test_a_home_directory_on_nfs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    environment = read_settings({})[0]
    assert environment.cache_dir.is_relative_to(tmp_path / "home")
    (finding,) = check_file_system(environment, [Mount("/", "ext4"), Mount(str(tmp_path / "home"), "nfs4")])
    assert finding.status is Status.WARN and "home directory" in finding.found


def test_the_innermost_and_latest_mount_counts(tmp_path: Path) -> None:
    mounts = [Mount(str(tmp_path), "ext4"), Mount("/", "nfs4"), Mount(str(tmp_path), "tmpfs")]
    (finding,) = check_file_system(machine(tmp_path).environment, mounts)
    assert finding.status is Status.INFO and "tmpfs" in finding.found
    beside = [Mount("/", "ext4"), Mount(str(tmp_path / "cac"), "nfs4")]
    assert check_file_system(machine(tmp_path).environment, beside)[0].status is Status.OK


def _artifact(staging: Path) -> dict[str, str]:
    (staging / "artifact.bin").write_bytes(b"code")
    return {"compiler": "fx"}


def for_chip(chip: str):
    def compile_into(staging: Path) -> dict:
        (staging / "x.neff").write_bytes(b"neff")
        return {"compiler": "neuronx", "chip": chip}

    return compile_into


def test_entries_for_another_chip_are_counted_and_no_switch_is_advised(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "cache")
    for index, target in enumerate(("trn1", "trn1", "trn2", "trn3")):
        cache.get_or_compile(GraphKey.of({"graph": str(index)}), for_chip(target))
    cache.get_or_compile(GraphKey.of({"graph": "cpu"}), _artifact)
    counted, other = check_entries(machine(tmp_path, instance="trn2.48xlarge"))
    assert counted.details == {"fx": 1, "neuronx": 4}
    assert other.status is Status.INFO and other.details == {"trn1": 2, "trn3": 1}
    assert "this machine has trn2" in other.found
    (counted,) = check_entries(machine(tmp_path))
    assert counted.status is Status.OK


def fail_to_compile(root: Path, name: str, message: str, **facts: str) -> None:
    def fail(staging: Path) -> dict:
        raise CompileError(message)

    with pytest.raises(CompileError):
        CompileCache(root).get_or_compile(GraphKey.of({"graph": name}), fail, facts=facts)


def test_a_recorded_failure_shows_its_log_and_its_versions(tmp_path: Path) -> None:
    message = "layer (decode_b8): neuronx-cc failed: ISA check failed"
    fail_to_compile(tmp_path / "cache", "x", message, compiler="neuronx", version="2.27.5334.0")
    (finding,) = check_failures(machine(tmp_path))
    assert finding.status is Status.WARN
    assert "ISA check failed" in finding.found and "2.27.5334.0" in finding.found
    log = Path(finding.details["log"])
    assert str(log) in finding.advice and "ISA check failed" in log.read_text()
    assert "VLLM_NEURON_RETRY_FAILED=1" in finding.advice


def test_a_status_of_the_runtime_in_a_failure_is_translated_with_the_chip_s_memory(tmp_path: Path) -> None:
    fail_to_compile(tmp_path / "cache", "x", "load: nrt_tensor_allocate status=4 message=Allocation Failure")
    (finding,) = check_failures(machine(tmp_path, instance="trn1.32xlarge"))
    assert "device memory" in finding.advice and "16 GiB" in finding.advice


def test_only_the_latest_failures_are_shown(tmp_path: Path) -> None:
    for index in range(8):
        fail_to_compile(tmp_path / "cache", str(index), f"failure number {index}")
    findings = check_failures(machine(tmp_path))
    assert "3 older" in findings[0].found
    assert [f"failure number {index}" in finding.found for index, finding in enumerate(findings[1:], 3)] == [
        True
    ] * 5


def test_looking_at_a_cache_changes_nothing_in_it(tmp_path: Path) -> None:
    fail_to_compile(tmp_path / "cache", "x", "no")
    CompileCache(tmp_path / "cache").get_or_compile(GraphKey.of({"graph": "y"}), _artifact)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    looked_at = machine(tmp_path)
    check_entries(looked_at), check_failures(looked_at), check_file_system(looked_at.environment)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before


def test_no_remote_cache_is_fine_and_a_local_one_without_trust_is_a_warning(tmp_path: Path) -> None:
    assert [str(finding.status) for finding in check_remote(machine(tmp_path).environment)] == ["info"]
    (tmp_path / "remote").mkdir()
    seen = machine(tmp_path, VLLM_NEURON_REMOTE_CACHE=f"file://{tmp_path / 'remote'}").environment
    reached, trust = check_remote(seen)
    assert reached.status is Status.OK
    assert trust.status is Status.WARN and "VLLM_NEURON_TRUSTED_KEYS" in trust.advice
    (tmp_path / "approved.txt").write_text("ab" * 32 + "  entry\n")
    trusting = {"VLLM_NEURON_TRUSTED_DIGESTS": str(tmp_path / "approved.txt")}
    reached, trust = check_remote(
        machine(tmp_path, VLLM_NEURON_REMOTE_CACHE=f"file://{tmp_path / 'remote'}", **trusting).environment
    )
    assert trust.status is Status.OK and trust.found == "0 keys, 1 digests"


def test_a_wrong_address_or_key_file_is_a_failure(tmp_path: Path) -> None:
    (finding,) = check_remote(machine(tmp_path, VLLM_NEURON_REMOTE_CACHE="no-scheme").environment)
    assert finding.status is Status.FAIL and "VLLM_NEURON_REMOTE_CACHE" in finding.found
    (tmp_path / "key.pem").write_text("not a key")
    seen = machine(
        tmp_path,
        VLLM_NEURON_REMOTE_CACHE=f"file://{tmp_path}",
        VLLM_NEURON_TRUSTED_KEYS=str(tmp_path / "key.pem"),
    )
    (finding,) = check_remote(seen.environment)
    assert finding.status is Status.FAIL and "key.pem" in finding.found


class Silent(http.server.BaseHTTPRequestHandler):
    """A server that takes a connection and answers nothing, as behind a bad route."""

    ended = threading.Event()

    def do_GET(self) -> None:
        self.ended.wait(60)

    do_HEAD = do_GET


def test_a_remote_that_does_not_answer_costs_its_timeout_and_is_a_warning(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = (
        "import json, sys; from neuron_core.doctor.remote import check_remote;"
        "from neuron_core.environ import Environment;"
        "print(json.dumps([f.to_json() for f in check_remote(Environment.read())]))"
    )
    variables = {
        "VLLM_NEURON_REMOTE_CACHE": "s3://bucket/graphs",
        "VLLM_NEURON_REMOTE_TIMEOUT": "1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "a-secret-word",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    finally:
        Silent.ended.set()
        server.shutdown()
        server.server_close()
    reached = json.loads(done.stdout)[0]
    assert (reached["name"], reached["status"]) == ("remote cache", "warn")
    assert "s3://bucket/graphs" in reached["found"]
    assert "a-secret-word" not in done.stdout + done.stderr
