# SPDX-License-Identifier: Apache-2.0
"""The whole report: `neuron doctor` in real processes, and a planted Neuron machine from end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_core.devices.neuron import Probe
from neuron_core.doctor.report import Report, examine

GIB = 1024**3


def doctor(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    variables = {"VLLM_NEURON_CACHE_DIR": str(tmp_path / "cache"), **variables}
    command = [sys.executable, "-m", "neuron_core.cli", "doctor", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | variables, timeout=120, check=False
    )


def statuses(report: dict) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for check in report["checks"]:
        found.setdefault(check["name"], set()).add(check["status"])
    return found


def test_this_machine_is_healthy_on_its_cpu_and_says_so(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"] is True
    (device,) = [check for check in report["checks"] if check["name"] == "device"]
    assert device["found"].startswith("CPU device: ") and device["details"]["device"] == "cpu"
    expected = {"settings", "device", "Neuron packages", "versions", "C++ compiler", "host memory"}
    assert expected | {"cache folder", "file system", "remote cache"} <= set(statuses(report))
    shown = doctor(tmp_path)
    assert shown.returncode == 0
    assert "healthy (" in shown.stdout and "CPU device: " in shown.stdout.splitlines()[-1]
    assert not (tmp_path / "cache").exists(), "looking must not make the cache"


def test_a_failed_check_is_exit_code_one_and_the_report_is_whole(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json", VLLM_NEURON_DEVICE="neuron", NEURON_COMPILED_ARTIFACTS="/data")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    found = statuses(report)
    assert report["healthy"] is False
    assert found["device"] == found["Neuron packages"] == {"fail"} and found["settings"] == {"warn"}
    shown = doctor(tmp_path, VLLM_NEURON_DEVICE="neuron")
    assert shown.returncode == 1
    assert (
        shown.stdout.splitlines()[-1]
        == "not healthy (2 warnings): device, driver, Neuron packages, neuronx-cc program"
    )
    for name in ("libtorch-neuronx-lite or torch-neuronx", "neuronx-cc", "nki"):
        assert name in shown.stdout


def test_a_wrong_setting_is_a_finding_and_no_crash(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json", VLLM_NEURON_DEVICE="gpu", VLLM_NEURON_REMOTE_TIMEOUT="soon")
    assert done.returncode == 1
    wrong = [check for check in json.loads(done.stdout)["checks"] if check["status"] == "fail"]
    assert sorted(check["found"].partition("=")[0] for check in wrong) == [
        "VLLM_NEURON_DEVICE",
        "VLLM_NEURON_REMOTE_TIMEOUT",
    ]


def plant_program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def trn2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trn2.48xlarge as far as files and programs show: nodes, driver, runtime, tools and wheels of SDK 2.32."""
    for folder in ("dev", "sys/module/neuron", "sys/devices/virtual/dmi/id", "site"):
        (tmp_path / folder).mkdir(parents=True)
    for index in range(16):
        (tmp_path / "dev" / f"neuron{index}").touch()
    (tmp_path / "sys/module/neuron/version").write_text("2.30.2.0\n")
    (tmp_path / "sys/devices/virtual/dmi/id/product_name").write_text("trn2.48xlarge\n")
    listed = [
        {"neuron_device": index, "nc_count": 4, "logical_neuroncore_config": 2, "memory_size": 96 * GIB}
        for index in range(16)
    ]
    plant_program(tmp_path / "bin", "neuron-ls", f"print({json.dumps(listed)!r})")
    plant_program(tmp_path / "bin", "neuronx-cc", "print('NeuronX Compiler version 2.27.5334.0+1f2e')")
    versions = "{'aws-neuronx-runtime-lib': '2.34.10.0-1f2e'}"
    plant_program(tmp_path / "bin", "dpkg-query", f"import sys\nprint({versions}[sys.argv[-1]], end='')")
    import torch

    release = ".".join(torch.__version__.split(".")[:2])
    wheels = {
        "libtorch_neuronx_lite": f"{release}.0.1.0.1284",
        "neuronxcc": "2.27.5334.0+1f2e",
        "nki": "0.6.0",
        "torch_xla": release,
    }
    for module, version in wheels.items():
        (tmp_path / "site" / module).mkdir()
        (tmp_path / "site" / module / "__init__.py").write_text(f"__version__ = {version!r}")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def examined(root: Path, **variables: str) -> Report:
    variables = {**os.environ, "VLLM_NEURON_CACHE_DIR": str(root / "cache"), **variables}
    started = Probe(64, "libtorch_neuronx_lite", "")
    return examine(variables, dev=root / "dev", sys=root / "sys", probe=lambda: started)


def test_a_neuron_machine_in_order_fails_nothing_but_the_untested_torch(trn2: Path) -> None:
    seen: list[str] = []
    report = examine(
        {**os.environ, "VLLM_NEURON_CACHE_DIR": str(trn2 / "cache")},
        dev=trn2 / "dev",
        sys=trn2 / "sys",
        probe=lambda: Probe(64, "libtorch_neuronx_lite", ""),
        on_check=seen.append,
    )
    found = statuses(report.to_json())
    for name in (
        "device",
        "instance",
        "driver",
        "cores",
        "logical cores",
        "libtorch-neuronx-lite",
        "neuronx-cc program",
        "nki",
    ):
        assert found[name] == {"ok"}, name
    assert "16 devices, 64 logical cores" in next(f.found for f in report.findings if f.name == "cores")
    assert "Neuron packages" not in found
    # The torch of this environment is in no SDK release yet, or is; only that may be remarked.
    failed = [finding for finding in report.findings if finding.status == "fail"]
    assert all(finding.name == "versions" and "torch" in finding.found for finding in failed)
    assert seen == ["device", "Neuron packages", "host", "compile cache", "remote cache"]


def test_one_thing_wrong_on_a_neuron_machine_is_what_fails(trn2: Path) -> None:
    before = {(f.name, f.found) for f in examined(trn2).findings if f.status == "fail"}
    conflict = examined(trn2, NEURON_LOGICAL_NC_CONFIG="1")
    new = [f for f in conflict.findings if f.status == "fail" and (f.name, f.found) not in before]
    assert [finding.name for finding in new] == ["logical cores"] and not conflict.healthy
    (trn2 / "site/nki/__init__.py").write_text("raise ImportError('placeholder')")
    broken = examined(trn2)
    new = [f for f in broken.findings if f.status == "fail" and (f.name, f.found) not in before]
    assert [finding.name for finding in new] == ["Neuron packages"] and "nki" in new[0].found
