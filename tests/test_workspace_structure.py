# SPDX-License-Identifier: Apache-2.0
"""What has to agree between the members of the workspace, and what no committed file may hold."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from devtools import pins, places, vllm_build

ROOT = Path(__file__).parents[1]


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


WORKSPACE = read_toml(ROOT / "pyproject.toml")
MEMBERS = WORKSPACE["tool"]["uv"]["workspace"]["members"]
PROJECTS = {member: read_toml(ROOT / member / "pyproject.toml") for member in MEMBERS}
NAMES = {entry["project"]["name"] for entry in PROJECTS.values()}
VERSION = "0.1.0"

each_member = pytest.mark.parametrize("member", MEMBERS)


def import_name(member: str) -> str:
    (package,) = PROJECTS[member]["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return Path(package).name


def committed_files() -> list[Path]:
    """Every file git holds or would add: what is ignored does not count."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def text_of(path: Path) -> str:
    return path.read_text(errors="replace")


def requirements(project: dict[str, Any]) -> list[str]:
    extras = project["project"].get("optional-dependencies", {}).values()
    return [*project["project"]["dependencies"], *(item for extra in extras for item in extra)]


def test_every_folder_of_packages_is_a_member():
    folders = {f"packages/{path.parent.name}" for path in (ROOT / "packages").glob("*/pyproject.toml")}
    assert folders == set(MEMBERS)


def test_every_member_is_known_to_import_linter():
    linter = WORKSPACE["tool"]["importlinter"]
    expected = {import_name(member) for member in MEMBERS}
    assert set(linter["root_packages"]) == expected
    layers, forbidden, _ = linter["contracts"]
    assert {name.strip() for layer in layers["layers"] for name in layer.split("|")} == expected
    assert set(forbidden["source_modules"]) == expected - {"vllm_neuron"}
    assert forbidden["forbidden_modules"] == ["vllm"]


def test_every_member_is_measured_and_taken_from_the_workspace():
    assert set(WORKSPACE["tool"]["coverage"]["run"]["source_pkgs"]) == {
        import_name(member) for member in MEMBERS
    }
    assert set(WORKSPACE["tool"]["uv"]["sources"]) == NAMES


@each_member
def test_versions_are_in_lockstep(member):
    assert PROJECTS[member]["project"]["version"] == VERSION
    source = (ROOT / member / "src" / import_name(member) / "__init__.py").read_text()
    assert re.search(rf'^__version__ = "{re.escape(VERSION)}"$', source, re.MULTILINE)


@each_member
def test_siblings_are_pinned_exactly(member):
    pattern = re.compile(rf"({'|'.join(NAMES)})(\[\w+\])?(.*)")
    siblings = [match for item in requirements(PROJECTS[member]) if (match := pattern.fullmatch(item))]
    assert all(match[3] == f"=={VERSION}" for match in siblings)
    assert len(siblings) >= (member != "packages/neuron-core")


@each_member
def test_a_member_requires_no_package_above_it(member):
    order = [PROJECTS[each]["project"]["name"] for each in MEMBERS]
    own = PROJECTS[member]["project"]["name"]
    required = {re.match(r"[\w-]+", item)[0] for item in requirements(PROJECTS[member])}
    assert required & NAMES <= set(order[: order.index(own)])
    assert ("vllm" in required) == (own == "vllm-neuron-plugin")


@each_member
def test_a_member_has_what_its_wheel_needs(member):
    folder = ROOT / member
    assert (folder / "src" / import_name(member) / "py.typed").is_file()
    assert (folder / "README.md").read_text().startswith(f"# {PROJECTS[member]['project']['name']}\n")
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_settings_of_the_checkers_are_only_at_the_root():
    checkers = {"ruff", "mypy", "pytest", "coverage", "importlinter"}
    assert not {member for member in MEMBERS if checkers & PROJECTS[member]["tool"].keys()}


def test_the_lock_holds_no_network_address():
    text = (ROOT / "uv.lock").read_text()
    assert "://" not in text
    assert set(re.findall(r"registry = \"([^\"]*)\"", text)) == {"wheelhouse"}


def test_every_file_of_the_lock_is_pinned_by_hash_or_built_here():
    locked = set(re.findall(r"path = \"([^\"]+)\"", (ROOT / "uv.lock").read_text()))
    pinned = {pin.file for pin in pins.read(places.REQUIREMENTS / "wheelhouse.txt")}
    assert locked - pinned == {vllm_build.WHEEL}


def configured_hosts() -> set[str]:
    """The hosts pip is set up with on this machine."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    hosts = {urlsplit(address).hostname for address in re.findall(r"https?://[^\s'\"]+", listed)}
    return {host for host in hosts if host and host != "localhost"}


def test_no_committed_file_names_a_package_index():
    # Spelled in two halves, so that this file is not what it looks for.
    hosts = {"py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org"} | configured_hosts()
    named = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in committed_files()
        for host in hosts
        if host in text_of(path)
    ]
    assert not named


def test_no_committed_file_holds_a_path_of_this_machine():
    paths = {str(ROOT), str(Path.home())} - {"/", "/root"} | {
        "/ro" + "ot/",
        "/ho" + "me/",
        "/wo" + "rk/",
        "/o" + "pt/",
    }
    pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(path)}" for path in sorted(paths)))
    named = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in committed_files()
        if (match := pattern.search(text_of(path)))
    ]
    assert not named


def test_every_python_file_names_its_licence():
    files = [path for path in committed_files() if path.suffix == ".py"]
    header = re.compile(r"(#!.*\n)?# SPDX-License-Identifier: Apache-2\.0\n")
    assert not [
        str(path.relative_to(ROOT)) for path in files if text_of(path) and not header.match(text_of(path))
    ]


def test_test_files_have_unique_names():
    names = [path.name for path in committed_files() if re.fullmatch(r"test_.*\.py", path.name)]
    assert len(names) == len(set(names))
