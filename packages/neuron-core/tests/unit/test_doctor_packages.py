# SPDX-License-Identifier: Apache-2.0
"""Neuron wheels, real and placeholder, and whether versions belong together.

Wheels are built by the tests in the forms that were found on the public index: metadata without a module, a module
that raises, an empty module.
"""

import sys
import zipfile
from pathlib import Path

import pytest

from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.compatibility import COMPONENTS, SDK_RELEASES, common_releases, numbers, releases_of
from neuron_core.doctor.machine import Machine
from neuron_core.doctor.pinning import check_pinning, open_requirements, pinned_names
from neuron_core.doctor.settings import read_settings
from neuron_core.doctor.versions import check_versions
from neuron_core.doctor.wheels import WHEELS, WheelState, check_wheels, examine_wheel

BY_NAME = {wheel.distribution: wheel for wheel in WHEELS}
SDK_2_32 = {
    "libtorch-neuronx-lite": "2.12.0.1.0.1284",
    "neuronx-cc": "2.27.5334.0+1f2e3d4c",
    "nki": "0.6.0+9a8b",
    "runtime": "2.34.10.0",
    "driver": "2.30.2.0",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def plant(
    site: Path, name: str, version: str, module: str = "", source: str | None = None, *requires: str
) -> None:
    """A package as an installer leaves it; without ``source`` it has metadata only."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires), ""]))
    if source is not None:
        (site / module).mkdir()
        (site / module / "__init__.py").write_text(source)


def plant_sdk(site: Path) -> None:
    """All wheels of SDK 2.32, as far as an import shows."""
    stack = SDK_2_32["libtorch-neuronx-lite"]
    plant(site, "libtorch-neuronx-lite", stack, "libtorch_neuronx_lite", f"__version__ = {stack!r}")
    plant(
        site,
        "neuronx-cc",
        "2.27.5334.0",
        "neuronxcc",
        "print('a banner')\n__version__ = '2.27.5334.0+1f2e3d4c'",
    )
    plant(site, "nki", "0.6.0", "nki", "")
    plant(site, "torch-xla", "2.12.0", "torch_xla", "")


def machine(tmp_path: Path, nodes: int = 0, **variables: str) -> Machine:
    (tmp_path / "dev").mkdir(exist_ok=True)
    for index in range(nodes):
        (tmp_path / "dev" / f"neuron{index}").touch()
    return Machine(read_settings(variables)[0], variables, tmp_path / "dev", tmp_path / "sys")


def examined() -> list:
    return [examine_wheel(wheel) for wheel in WHEELS]


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("name", "version", "source", "state", "reason"),
    [
        ("neuronx-cc", "1.0.post1", None, "placeholder", "has no module neuronxcc"),
        (
            "torch-neuronx",
            "1.0",
            "raise ImportError('wrong package\\nread on')",
            "placeholder",
            "start at 2.0",
        ),
        ("nki", "0.0.1", "raise ImportError('get the real one')", "placeholder", "get the real one"),
        ("libtorch-neuronx-lite", "0.0.1", "", "placeholder", "version 0.0.1"),
        ("neuronx-cc", "2.27.5334.0", "", "real", ""),
        ("neuronx-cc", "2.27.5334.0", "import no_such_libnrt", "broken", "no_such_libnrt"),
        ("neuronx-cc", "2.27.5334.0", "import os; os.abort()", "broken", "signal 6"),
        ("neuronx-cc", "2.27.5334.0", "__version__ = '1.0'", "placeholder", "version 1.0"),
        ("nki", "0.6.0", "print('hello')\n__version__ = '0.6.0'", "real", ""),
    ],
)
def test_a_wheel_is_known_by_its_import_and_its_version(
    site: Path, name: str, version: str, source: str | None, state: str, reason: str
) -> None:
    module = BY_NAME[name].module
    plant(site, name, version, module, source)
    found = examine_wheel(BY_NAME[name])
    assert str(found.state) == state and reason in found.reason
    assert module not in sys.modules, "the vendor's package must not be imported here"


def test_a_module_without_metadata_is_no_real_wheel(site: Path) -> None:
    (site / "nki").mkdir()
    assert examine_wheel(BY_NAME["nki"]).state is WheelState.PLACEHOLDER


def test_a_placeholder_installed_from_its_wheel_is_recognised(site: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "neuronx_cc-1.0.post1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        info = "neuronx_cc-1.0.post1.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: neuronx-cc\nVersion: 1.0.post1\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)  # all that installing a wheel without scripts is
    findings = by_name(check_wheels(machine(tmp_path), examined()))
    assert findings["neuronx-cc"].status is Status.WARN
    assert "placeholder" in findings["neuronx-cc"].found and "pip uninstall" in findings["neuronx-cc"].advice


def test_without_any_wheel_a_machine_without_a_device_is_healthy(tmp_path: Path) -> None:
    (finding,) = check_wheels(machine(tmp_path), examined())
    assert finding.status is Status.OK and "none needed for the CPU device" in finding.found


def test_on_a_neuron_machine_every_missing_wheel_is_named_with_what_to_install(tmp_path: Path) -> None:
    (finding,) = check_wheels(machine(tmp_path, nodes=1), examined())
    assert finding.status is Status.FAIL
    for name in ("libtorch-neuronx-lite or torch-neuronx", "neuronx-cc", "torch-xla", "nki"):
        assert name in finding.found
    assert "neuronx-cc==" in finding.advice


def test_a_placeholder_counts_as_missing(site: Path, tmp_path: Path) -> None:
    plant_sdk(site)
    assert "Neuron packages" not in by_name(check_wheels(machine(tmp_path, nodes=1), examined()))
    (site / "nki-0.6.0.dist-info").rename(site / "nki-0.0.1.dist-info")
    (site / "nki-0.0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: nki\nVersion: 0.0.1\n")
    findings = by_name(check_wheels(machine(tmp_path, nodes=1), examined()))
    assert findings["Neuron packages"].status is Status.FAIL
    assert findings["Neuron packages"].details["missing"] == ["nki"]


def test_compiling_for_neuron_without_a_device_needs_compiler_and_lowering_only(tmp_path: Path) -> None:
    aot = machine(tmp_path, VLLM_NEURON_CPU_COMPILE="1", NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    (finding,) = check_wheels(aot, examined())
    assert finding.status is Status.FAIL and finding.details["missing"] == ["neuronx-cc", "torch-xla"]
    cpu = machine(tmp_path, VLLM_NEURON_CPU_COMPILE="1", NEURON_PLATFORM_TARGET_OVERRIDE="cpu")
    assert check_wheels(cpu, examined())[0].status is Status.OK


def test_a_whole_release_belongs_together() -> None:
    (finding,) = check_versions(SDK_2_32, "2.12.1", "3.12.4", wanted=True)
    assert finding.status is Status.OK and finding.details["releases"] == ["2.32"]


@pytest.mark.parametrize(
    ("change", "torch", "python", "named"),
    [
        ({"neuronx-cc": "2.25.3371.0"}, "2.12.1", "3.12.4", "neuronx-cc 2.25.3371.0 (SDK 2.30)"),
        ({"nki": "0.4.0"}, "2.12.1", "3.12.4", "nki 0.4.0 (SDK 2.30)"),
        ({}, "2.9.0", "3.12.4", "is for torch 2.12, and torch 2.9.0 is installed"),
        ({}, "2.12.1", "3.10.2", "python 3.10.2 (SDK 2.27 to 2.29)"),
        ({"libtorch-neuronx-lite": "2.12.0.1.0.696"}, "2.12.1", "3.12.4", "(SDK 2.31)"),
    ],
)
def test_a_mixture_of_releases_fails_where_neuron_is_wanted_and_names_the_odd_one(
    change: dict[str, str], torch: str, python: str, named: str
) -> None:
    findings = check_versions(SDK_2_32 | change, torch, python, wanted=True)
    assert any(finding.status is Status.FAIL and named in finding.found for finding in findings)
    relaxed = check_versions(SDK_2_32 | change, torch, python, wanted=False)
    assert {finding.status for finding in relaxed} == {Status.WARN}


def test_a_mixture_with_the_driver_alone_is_a_warning() -> None:
    (finding,) = check_versions(SDK_2_32 | {"driver": "2.28.0.0"}, "2.12.1", "3.12.4", wanted=True)
    assert finding.status is Status.WARN and "change driver" in finding.advice


def test_a_version_newer_than_the_table_is_said_to_be_unknown() -> None:
    findings = check_versions(SDK_2_32 | {"nki": "0.99.0"}, "2.12.1", "3.12.4", wanted=True)
    assert [str(finding.status) for finding in findings] == ["warn", "ok"]
    assert "nki 0.99.0" in findings[0].found


def test_without_neuron_components_there_is_nothing_to_compare() -> None:
    (finding,) = check_versions({}, "2.13.0", "3.11.7", wanted=False)
    assert finding.status is Status.INFO


def test_every_row_of_the_table_is_told_apart_from_every_other() -> None:
    for release in SDK_RELEASES:
        wheel = f"{release.torch[-1]}.0.1.0.{release.libtorch_neuronx_lite}"
        versions = {
            "neuronx-cc": release.neuronx_cc,
            "nki": release.nki,
            "runtime": release.runtime,
            "driver": release.driver,
            "python": release.python[0],
            "torch": release.torch[0],
        }
        if release.torch_neuronx is not None:
            versions["torch-neuronx"] = f"{release.torch[0]}.0.{release.torch_neuronx}"
        if release.libtorch_neuronx_lite is not None:
            versions["libtorch-neuronx-lite"] = wheel
        assert common_releases(versions) == (release.name,)
        for name, version in versions.items():
            assert name in COMPONENTS and release.name in (releases_of(name, version) or ())
    assert numbers("no version") == ()


def test_an_open_requirement_of_a_huge_wheel_is_a_warning_with_the_pins_that_end_it(
    site: Path, tmp_path: Path
) -> None:
    plant(
        site, "torch-neuronx", "2.9.0.2.15.32035", "", None, "neuronx-cc>=2.0", "torch==2.9.*", "nki==0.5.0"
    )
    plant(site, "other", "1.0", "", None, "libneuronxla; extra == 'neuron'")
    assert set(open_requirements()) == {"neuronx-cc"}
    installed = {"torch-neuronx": "2.9.0.2.15.32035", "neuronx-cc": "2.26.6360.0"}
    (finding,) = check_pinning({}, installed)
    assert finding.status is Status.WARN
    assert "torch-neuronx: neuronx-cc>=2.0" in finding.found
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in finding.advice.rpartition(": ")[2].split(", ")))
    (pinned,) = check_pinning({"PIP_CONSTRAINT": str(constraints)}, installed)
    assert pinned.status is Status.OK


def test_a_constraints_file_pins_only_what_it_gives_one_version(tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text(
        "# comment\n-c other.txt\nNeuronX_CC==2.27.5334.0 --hash=sha256:00  # huge\nnki>=0.6\ntorch\n???\n"
    )
    assert pinned_names(file) == {"neuronx-cc"}
    (finding,) = check_pinning({"PIP_CONSTRAINT": str(tmp_path / "none.txt")}, {"nki": "0.6.0"})
    assert finding.status is Status.WARN and "PIP_CONSTRAINT" in finding.found


def test_nothing_is_said_about_pins_without_a_neuron_wheel() -> None:
    assert check_pinning({}, {}) == []
