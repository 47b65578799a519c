# SPDX-License-Identifier: Apache-2.0
"""Device, driver, cores and settings, each with a condition that makes the check speak.

Device nodes, kernel files and the vendor's tools are planted as real files and executables.
"""

import json
import sys
from pathlib import Path

import pytest

from neuron_core.devices.neuron import Probe
from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.device import check_device, check_instance
from neuron_core.doctor.driver import check_driver, runtime_version
from neuron_core.doctor.inventory import check_cores, check_logical_cores, list_devices
from neuron_core.doctor.machine import Machine
from neuron_core.doctor.settings import check_settings, read_settings
from neuron_core.errors import DeviceError

GIB = 1024**3


def machine(tmp_path: Path, *, nodes: int = 0, instance: str = "", **variables: str) -> Machine:
    dev, sys_root = tmp_path / "dev", tmp_path / "sys"
    dev.mkdir(exist_ok=True)
    for index in range(nodes):
        (dev / f"neuron{index}").touch()
    if instance:
        dmi = sys_root / "devices/virtual/dmi/id"
        dmi.mkdir(parents=True, exist_ok=True)
        (dmi / "product_name").write_text(f"{instance}\n")
    environment, errors = read_settings(variables)
    assert not errors
    return Machine(environment, variables, dev, sys_root)


def plant_program(folder: Path, name: str, body: str) -> None:
    """An executable on the path."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)


def plant_neuron_ls(folder: Path, *devices: dict) -> list:
    """A stand-in for `neuron-ls` that prints the documented JSON under -j, and text otherwise."""
    text = json.dumps([{**LISTED, "neuron_device": index, **each} for index, each in enumerate(devices)])
    plant_program(
        folder,
        "neuron-ls",
        f"import sys\nprint({text!r} if sys.argv[1:] == ['-j'] else 'instance-type: trn2')",
    )
    found = list_devices(str(folder))
    assert found is not None
    return found


LISTED = {
    "neuron_device": 0,
    "bdf": "00:1e.0",
    "cpu_affinity": "0-11",
    "numa_node": "0",
    "connected_to": None,
    "nc_count": 4,
    "logical_neuroncore_config": 2,
    "memory_size": 96 * GIB,
    "neuroncore_ids": [0, 1, 2, 3],
    "neuron_processes": [],
}


def statuses(findings: list[Finding]) -> list[str]:
    return [str(finding.status) for finding in findings]


def dead() -> Probe:
    return Probe(0, "", "libtorch_neuronx_lite cannot be imported (No module named 'libtorch_neuronx_lite')")


def never() -> Probe:
    raise AssertionError("the runtime must not be probed")


def test_a_machine_without_a_device_is_healthy_and_says_why_the_cpu(tmp_path: Path) -> None:
    (finding,) = check_device(machine(tmp_path), never)
    assert finding.status is Status.OK
    assert finding.found == f"CPU device: no Neuron device node ({tmp_path / 'dev'}/neuron*)"
    assert check_instance(machine(tmp_path)) == []


def test_a_device_whose_runtime_does_not_start_is_a_failure_with_the_reason(tmp_path: Path) -> None:
    (finding,) = check_device(machine(tmp_path, nodes=16), dead)
    assert finding.status is Status.FAIL
    assert "16 Neuron device nodes" in finding.found and "cannot be imported" in finding.found
    assert "VLLM_NEURON_DEVICE=cpu" in finding.advice


def test_the_cpu_on_purpose_is_no_failure(tmp_path: Path) -> None:
    chosen = machine(tmp_path, nodes=16, instance="trn2.48xlarge", VLLM_NEURON_DEVICE="cpu")
    assert statuses(check_device(chosen, never)) == ["ok"]
    assert statuses(check_instance(chosen)) == ["ok"]
    assert not chosen.wants_neuron


def test_forcing_neuron_where_there_is_none_is_a_failure(tmp_path: Path) -> None:
    (finding,) = check_device(machine(tmp_path, VLLM_NEURON_DEVICE="neuron"), never)
    assert finding.status is Status.FAIL and "no Neuron device node" in finding.found


def test_a_runtime_that_starts_is_reported(tmp_path: Path) -> None:
    started = Probe(64, "libtorch_neuronx_lite 2.12.0.1.0.1284", "")
    (finding,) = check_device(machine(tmp_path, nodes=16), lambda: started)
    assert finding.status is Status.OK and "64 logical cores" in finding.found


def test_an_instance_with_chips_and_no_nodes_lacks_the_driver(tmp_path: Path) -> None:
    (finding,) = check_instance(machine(tmp_path, instance="trn2.48xlarge"))
    assert finding.status is Status.FAIL and "aws-neuronx-dkms" in finding.advice
    assert check_instance(machine(tmp_path, instance="m7i.large")) == []


def test_driver_and_runtime_are_named_when_missing_and_shown_when_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert check_driver(machine(tmp_path)) == []
    missing = check_driver(machine(tmp_path, nodes=1))
    assert [(each.name, str(each.status)) for each in missing] == [("driver", "fail"), ("runtime", "warn")]
    package = "import sys\nversions = {'aws-neuronx-runtime-lib': '2.34.10.0-1f2e', 'aws-neuronx-dkms': '2.30.2.0'}\n"
    plant_program(tmp_path / "bin", "dpkg-query", package + "print(versions[sys.argv[-1]], end='')")
    assert runtime_version() == "2.34.10.0"
    installed, runtime = check_driver(machine(tmp_path, nodes=1))
    assert installed.status is Status.FAIL and "not loaded" in installed.found
    (tmp_path / "sys/module/neuron").mkdir(parents=True)
    (tmp_path / "sys/module/neuron/version").write_text("2.30.2.0\n")
    loaded, runtime = check_driver(machine(tmp_path, nodes=1))
    assert loaded.status is Status.OK and loaded.found.startswith("2.30.2.0")
    assert runtime.status is Status.OK and "2.34.10.0" in runtime.found


def test_a_package_that_is_not_installed_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    plant_program(
        tmp_path / "bin", "dpkg-query", "import sys\nsys.exit('no packages found matching ' + sys.argv[-1])"
    )
    plant_program(tmp_path / "bin", "rpm", "print('package is not installed')\nraise SystemExit(1)")
    assert runtime_version() is None
    plant_program(tmp_path / "bin", "rpm", "print('2.33.10.0', end='')")
    assert runtime_version() == "2.33.10.0"


def test_the_core_inventory_is_printed_with_who_holds_cores(tmp_path: Path) -> None:
    holder = {"pid": 4711, "command": "python serve.py", "neuron_runtime_version": "2.34.10.0"}
    devices = plant_neuron_ls(tmp_path / "bin", {}, {"neuron_processes": [holder]})
    inventory, held = check_cores(machine(tmp_path, nodes=2), devices)
    assert inventory.found == "2 devices, 8 logical cores (96 GiB, LNC 2 per device)"
    assert held.status is Status.WARN and "pid 4711 (python serve.py)" in held.found


def test_visible_cores_that_do_not_exist_are_a_failure(tmp_path: Path) -> None:
    devices = plant_neuron_ls(tmp_path / "bin", {})
    seen = machine(tmp_path, nodes=1, NEURON_VISIBLE_DEVICES="2-5")
    finding = check_cores(seen, devices)[-1]
    assert finding.status is Status.FAIL
    assert "core 4, 5, and there are 4" in finding.found and "0 to 3" in finding.advice
    fitting = machine(tmp_path, nodes=1, NEURON_VISIBLE_DEVICES="2,3")
    assert statuses(check_cores(fitting, devices)) == ["ok"]


@pytest.mark.parametrize(
    ("variables", "devices", "status"),
    [
        ({"NEURON_LOGICAL_NC_CONFIG": "2"}, ({}, {}), "ok"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, ({}, {}), "fail"),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, ({},), "fail"),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "two"}, ({},), "fail"),
        ({}, ({}, {"logical_neuroncore_config": 1}), "fail"),
        ({}, ({},), "ok"),
    ],
)
def test_logical_core_sizes_that_disagree_are_a_failure(
    tmp_path: Path, variables: dict[str, str], devices: tuple[dict, ...], status: str
) -> None:
    listed = plant_neuron_ls(tmp_path / "bin", *devices)
    (finding,) = check_logical_cores(machine(tmp_path, nodes=1, **variables), listed)
    assert str(finding.status) == status


def test_a_logical_core_size_the_chip_does_not_have_is_a_failure(tmp_path: Path) -> None:
    old = machine(tmp_path, instance="trn1.32xlarge", NEURON_LOGICAL_NC_CONFIG="2")
    (finding,) = check_logical_cores(old, None)
    assert finding.status is Status.FAIL and "trn1 takes 1" in finding.advice


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("print('no devices found')", "something else than its documentation says"),
        ("print('[{\"neuron_device\": 0}]')", "something else than its documentation says"),
        ("import sys\nsys.exit('driver is not loaded')", "ended with status 1: driver is not loaded"),
        ("import time\ntime.sleep(30)", "did not answer within"),
    ],
)
def test_a_neuron_ls_that_fails_is_reported(tmp_path: Path, body: str, complaint: str) -> None:
    plant_program(tmp_path / "bin", "neuron-ls", body)
    with pytest.raises(DeviceError, match=complaint):
        list_devices(str(tmp_path / "bin"), timeout_s=2.0)


def test_without_neuron_ls_only_a_neuron_machine_is_told(tmp_path: Path) -> None:
    assert list_devices(str(tmp_path)) is None
    assert check_cores(machine(tmp_path), None) == []
    assert statuses(check_cores(machine(tmp_path, nodes=1), None)) == ["warn"]


def test_every_wrong_setting_is_named_not_only_the_first(tmp_path: Path) -> None:
    variables = {
        "VLLM_NEURON_DEVICE": "gpu",
        "NEURON_LOGICAL_NC_CONFIG": "3",
        "VLLM_NEURON_CACHE_DIR": str(tmp_path),
    }
    environment, errors = read_settings(variables)
    assert sorted(error.setting for error in errors) == ["NEURON_LOGICAL_NC_CONFIG", "VLLM_NEURON_DEVICE"]
    assert environment.cache_dir == tmp_path
    findings = check_settings(variables, errors)
    assert statuses(findings) == ["fail", "fail"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NEURON_COMPILED_ARTIFACTS", "/data", "VLLM_NEURON_CACHE_DIR"),
        ("VLLM_NEURON_CACHE_DRI", "/data", "did you mean 'VLLM_NEURON_CACHE_DIR'"),
        ("NEURON_RT_ALLOW_LEGACY_NEFF", "1", "compiled per chip"),
        ("NEURON_RT_VISIBLE_CORES", "0-3", "NEURON_VISIBLE_DEVICES"),
        ("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "4", "does nothing since SDK 2.32"),
    ],
)
def test_a_dead_misspelt_or_dangerous_variable_is_a_warning(name: str, value: str, expected: str) -> None:
    (finding,) = check_settings({name: value}, [])
    assert finding.status is Status.WARN and name in finding.found
    assert expected in f"{finding.found} {finding.advice}"


def test_settings_without_fault_are_said_to_be_so() -> None:
    assert statuses(
        check_settings({"VLLM_NEURON_DEVICE": "cpu", "NEURON_RT_ALLOW_LEGACY_NEFF": "0"}, [])
    ) == ["ok"]
