# SPDX-License-Identifier: Apache-2.0
"""Neuron is chosen only where its runtime starts; otherwise one line says why not.

The vendor packages are planted as real directories on the path and imported by the probe's own process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from neuron_core.devices.base import Device
from neuron_core.devices.cpu import CpuDevice
from neuron_core.devices.discovery import discover, open_device
from neuron_core.devices.neuron import NeuronDevice, Probe, probe_in_child
from neuron_core.devices.registry import device_names
from neuron_core.environ import Environment
from neuron_core.errors import ConfigError, DeviceError

AUTO = Environment.read({})
FORCED = Environment.read({"VLLM_NEURON_DEVICE": "neuron"})

RUNTIME = """
__version__ = "2.11.0.1.0.1284"
import types, torch
class Runtime:
    def get_nc_count(self): {body}
torch.classes.neuron = types.SimpleNamespace(Runtime=Runtime)
"""


@pytest.fixture
def dev_root(tmp_path: Path) -> Path:
    root = tmp_path / "dev"
    root.mkdir()
    (root / "neuron0").touch()
    return root


def plant(path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    package = path / "site" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(path / "site")


def never() -> Probe:
    raise AssertionError("the runtime must not be probed")


def test_without_a_device_node_nothing_is_probed(tmp_path: Path) -> None:
    (tmp_path / "neuron_monitor").touch()
    found = discover(AUTO, dev_root=tmp_path, probe=never)
    assert found.device.name == "cpu"
    assert found.reason == f"CPU device: no Neuron device node ({tmp_path}/neuron*)"


def test_forcing_neuron_without_a_device_node_names_it(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"VLLM_NEURON_DEVICE='neuron': no Neuron device node"):
        discover(FORCED, dev_root=tmp_path, probe=never)


def test_forcing_the_cpu_probes_nothing_even_with_a_device(dev_root: Path) -> None:
    found = discover(Environment.read({"VLLM_NEURON_DEVICE": "cpu"}), dev_root=dev_root, probe=never)
    assert (found.device.name, found.reason) == ("cpu", "CPU device: VLLM_NEURON_DEVICE=cpu")


def test_neuron_settings_that_do_nothing_on_the_cpu_are_remarked(tmp_path: Path) -> None:
    environment = Environment.read({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"})
    found = discover(environment, dev_root=tmp_path)
    assert found.remarks == ("NEURON_PLATFORM_TARGET_OVERRIDE is set and has no effect on the CPU device",)


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("torch_neuronx", "raise ImportError('wrong package:\\nread the guide')", "(wrong package:)"),
        ("torch_neuronx", "", "torch_neuronx without a version is a placeholder (2.0 or later is needed)"),
        ("torch_neuronx", "__version__ = '1.0'", "torch_neuronx 1.0 is a placeholder"),
        ("libtorch_neuronx_lite", "__version__ = '2.9.0'", "libtorch_neuronx_lite 2.9.0 is a placeholder"),
        ("torch_neuronx", "raise OSError('libnrt.so.1: no such file')", "(libnrt.so.1: no such file)"),
        ("libtorch_neuronx_lite", "__version__ = '2.11.0'", "the runtime of libtorch_neuronx_lite 2.11.0"),
        ("libtorch_neuronx_lite", RUNTIME.format(body="return -1"), "does not start (core count -1"),
        ("libtorch_neuronx_lite", "import os; os.abort()", "ended with status -6"),
    ],
)
def test_a_stack_that_does_not_start_leaves_the_cpu_device_and_one_line_of_reason(
    name: str, source: str, reason: str, dev_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, monkeypatch, name, source)
    found = discover(AUTO, dev_root=dev_root)
    assert found.device.name == "cpu"
    assert reason in found.reason
    assert "\n" not in found.reason
    assert name not in sys.modules, "choosing must not import the vendor's package here"


def test_a_runtime_that_starts_is_chosen(
    dev_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, monkeypatch, "libtorch_neuronx_lite", "print('hello')" + RUNTIME.format(body="return 4"))
    found = discover(AUTO, dev_root=dev_root)
    assert found.device.name == "neuron"
    assert found.reason == "Neuron device: 4 logical cores, libtorch_neuronx_lite 2.11.0.1.0.1284"


def test_a_runtime_that_hangs_is_given_up() -> None:
    assert probe_in_child(timeout_s=0.01).reason == "the Neuron runtime did not answer within 0 s"


def test_forcing_neuron_names_every_missing_package(dev_root: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        discover(FORCED, dev_root=dev_root)
    assert "libtorch_neuronx_lite cannot be imported" in str(caught.value)
    assert "torch_neuronx cannot be imported" in str(caught.value)


def test_open_device_takes_the_parent_s_choice_without_probing() -> None:
    for name in ("cpu", "neuron"):
        device: Device = open_device(name, AUTO)
        assert device.name == name
    with pytest.raises(DeviceError, match="did you mean 'neuron'"):
        open_device("neurn", AUTO)


def test_neuron_gives_each_rank_the_core_it_may_use() -> None:
    device = NeuronDevice(Environment.read({"NEURON_VISIBLE_DEVICES": "4-7"}))
    cores = [device.runtime_variables(rank, 4)["NEURON_RT_VISIBLE_CORES"] for rank in range(4)]
    assert cores == ["4", "5", "6", "7"]
    assert NeuronDevice(AUTO).runtime_variables(1, 2) == {
        "NEURON_RT_VISIBLE_CORES": "1",
        "NEURON_RT_MAP_HBM": "1",
    }
    with pytest.raises(ConfigError, match=r"NEURON_VISIBLE_DEVICES='4,5,6,7'.*list exactly 2"):
        device.runtime_variables(0, 2)


def test_neuron_knows_its_chip_from_the_override_or_the_instance(tmp_path: Path) -> None:
    product = tmp_path / "product_name"
    assert NeuronDevice(AUTO, product_name=product).chip is None
    product.write_text("trn2.48xlarge\n")
    chip = NeuronDevice(AUTO, product_name=product).chip
    assert chip is not None and chip.name == "trn2"
    override = Environment.read(
        {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3pre", "NEURON_LOGICAL_NC_CONFIG": "1"}
    )
    assert NeuronDevice(override, product_name=product).identity() == "neuron-trn3pre-lnc1-"
    bad = Environment.read({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1", "NEURON_LOGICAL_NC_CONFIG": "2"})
    with pytest.raises(ConfigError, match="NEURON_LOGICAL_NC_CONFIG=2"):
        NeuronDevice(bad)


def test_neuron_without_its_stack_says_what_is_missing() -> None:
    device = NeuronDevice(AUTO)
    with pytest.raises(DeviceError, match="before start"):
        device.total_memory_bytes()
    with pytest.raises(DeviceError, match="libtorch_neuronx_lite cannot be imported"):
        _ = device.torch_device


@pytest.mark.parametrize("name", ["cpu", "neuron"])
def test_both_devices_have_every_member_of_the_protocol(name: str) -> None:
    members = {member for member in vars(Device) if not member.startswith("_")} | set(Device.__annotations__)
    assert {"name", "start", "prepare", "torch_device"} <= members <= set(dir(open_device(name, AUTO)))


STARTED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from neuron_core.devices.neuron import NeuronDevice
from neuron_core.environ import Environment
environment = Environment.read({"NEURON_VISIBLE_DEVICES": "2,3", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"})
device = NeuronDevice(environment)
device.start(1, 2)
device.synchronize()
print(os.environ["NEURON_RT_VISIBLE_CORES"], device.total_memory_bytes(), device.available_memory_bytes())
print(device.identity(), device.torch_device)
"""

WORKING = """
__version__ = "2.11.0"
import os, types, torch
torch.utils.rename_privateuse1_backend("neuron")
class Runtime:
    def initialize(self): self.core = os.environ["NEURON_RT_VISIBLE_CORES"]
    def get_nc_count(self): return 1 if self.core == "3" else -1
    def get_vnc_memory_stats(self): return (1000, 24000)
torch.classes.neuron = types.SimpleNamespace(Runtime=Runtime)
"""


def test_a_started_neuron_device_owns_its_core_and_reports_its_memory(tmp_path: Path) -> None:
    package = tmp_path / "libtorch_neuronx_lite"
    package.mkdir()
    (package / "__init__.py").write_text(WORKING)
    command = [sys.executable, "-c", STARTED, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == [
        "3 25000 24000",
        "neuron-trn2-lnc2-libtorch_neuronx_lite-2.11.0 neuron",
    ]


def test_cpu_device_is_a_device_and_its_identity_names_the_thread_count() -> None:
    device = CpuDevice()
    assert device.torch_device == torch.device("cpu") and device.chip is None
    capability = torch.backends.cpu.get_cpu_capability()
    assert f"-{capability}-" in device.identity()
    assert device.identity().endswith(f"-t{len(device.threads(0, 1))}")


def plant_device(
    site: Path, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, calls_itself: str
) -> None:
    """A distribution on the path that provides a device by entry point, as an installed one would."""
    module = f"{owner}_device"
    (site / f"{module}.py").write_text(
        "from neuron_core.devices.cpu import CpuDevice\n"
        f"class Added(CpuDevice):\n    name = {calls_itself!r}\n"
        "def make(environment):\n    return Added(cache_dir=environment.cache_dir)\n"
    )
    info = site / f"{owner}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {owner}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[neuron_core.devices]\n{name} = {module}:make\n")
    monkeypatch.syspath_prepend(site)


def test_a_device_of_another_distribution_is_used_when_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_device(tmp_path, monkeypatch, "first", "simulated", "simulated")
    environment = Environment.read({"VLLM_NEURON_DEVICE": "simulated"})
    found = discover(environment, dev_root=tmp_path, probe=never)
    assert (found.device.name, found.reason) == (
        "simulated",
        "simulated device: VLLM_NEURON_DEVICE=simulated",
    )
    assert discover(AUTO, dev_root=tmp_path, probe=never).device.name == "cpu"
    with pytest.raises(ConfigError, match="did you mean 'simulated'"):
        Environment.read({"VLLM_NEURON_DEVICE": "simulatd"})


def test_a_device_that_two_claim_or_that_lies_about_its_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_device(tmp_path, monkeypatch, "liar", "tidy", "messy")
    with pytest.raises(DeviceError, match="'messy'"):
        open_device("tidy", AUTO)
    plant_device(tmp_path, monkeypatch, "rival", "tidy", "tidy")
    with pytest.raises(DeviceError, match=r"liar, rival|rival, liar"):
        open_device("tidy", AUTO)


def test_no_distribution_can_replace_a_built_in_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_device(tmp_path, monkeypatch, "usurper", "cpu", "cpu")
    with pytest.raises(DeviceError, match="'cpu' is built in"):
        device_names()
    assert open_device("cpu", AUTO).name == "cpu"
