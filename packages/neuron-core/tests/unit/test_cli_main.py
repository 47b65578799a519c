# SPDX-License-Identifier: Apache-2.0
"""The group `neuron`: fast help, commands of other packages, errors as one line, exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from neuron_core import __version__
from neuron_core.cli.commands import GROUP, plugin_commands
from neuron_core.cli.main import neuron
from neuron_core.cli.output import format_age, format_bytes


def run_process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "neuron_core.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **variables}, check=False, timeout=120
    )


def plant_distribution(folder: Path, name: str, entry_points: dict[str, str], **modules: str) -> None:
    """An installed package, as an installer leaves it."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{GROUP}]", *(f"{command} = {target}" for command, target in entry_points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "extra_command", raising=False)
    plugin_commands.cache_clear()
    yield tmp_path
    plugin_commands.cache_clear()


HELLO = """
import click

@click.command()
def hello():
    "Say hello."
    click.echo("hello from a plug-in")
"""


def test_help_lists_the_commands_and_imports_neither_torch_nor_vllm() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "neuron_core.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert re.search(r"^  cache +List", done.stdout, re.M) and re.search(
        r"^  doctor +Check", done.stdout, re.M
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "click" in imported, "the report of imported modules was not read"
    assert not imported & {"torch", "numpy", "cryptography", "fsspec", "vllm", "transformers"}


def test_the_version_is_the_package_s() -> None:
    assert CliRunner().invoke(neuron, ["--version"]).output == f"neuron, version {__version__}\n"


def test_every_command_has_an_example_and_takes_json() -> None:
    def leaves(command: click.Command, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        if not isinstance(command, click.Group):
            return [path]
        context = click.Context(command)
        names = command.list_commands(context)
        return [each for name in names for each in leaves(command.get_command(context, name), (*path, name))]

    found = [path for path in leaves(neuron, ()) if path[0] in ("cache", "doctor")]
    assert len(found) == 10
    for path in found:
        text = CliRunner().invoke(neuron, [*path, "--help"]).output
        assert "--json" in text, path
        assert f"neuron {' '.join(path)}" in text.partition("Example")[2], path


def test_a_mistyped_command_is_a_usage_error_with_the_nearest_name() -> None:
    done = run_process("cahce", "ls")
    assert done.returncode == 2 and done.stdout == ""
    assert "Error: no command 'cahce': did you mean 'cache'?" in done.stderr


def test_an_error_of_ours_is_one_line_and_exit_code_one(tmp_path: Path) -> None:
    done = run_process("cache", "ls", VLLM_NEURON_CACHE_DIR=str(tmp_path / "nowhere"))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"Error: {tmp_path / 'nowhere'} is no compile cache")
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_setting_is_reported_without_a_traceback() -> None:
    done = run_process("cache", "prune", VLLM_NEURON_CACHE_MAX_SIZE="a lot")
    assert done.returncode == 1
    assert done.stderr == "Error: VLLM_NEURON_CACHE_MAX_SIZE='a lot': is not a size; 20GiB works\n"


def test_another_package_adds_a_command(site: Path) -> None:
    plant_distribution(site, "neuron-extra", {"hello": "extra_command:hello"}, extra_command=HELLO)
    assert re.search(r"^  hello +Say hello", CliRunner().invoke(neuron, ["--help"]).output, re.M)
    assert CliRunner().invoke(neuron, ["hello"]).output == "hello from a plug-in\n"


def test_a_real_process_finds_the_command_of_another_package(tmp_path: Path) -> None:
    plant_distribution(tmp_path, "neuron-extra", {"hello": "extra_command:hello"}, extra_command=HELLO)
    done = run_process("hello", PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    assert (done.returncode, done.stdout) == (0, "hello from a plug-in\n")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("raise RuntimeError('half installed')", "RuntimeError: half installed"),
        ("hello = 3", "extra_command:hello is not a click command"),
    ],
)
def test_a_broken_command_is_shown_as_broken_and_hides_no_other(site: Path, source: str, reason: str) -> None:
    plant_distribution(site, "neuron-extra", {"hello": "extra_command:hello"}, extra_command=source)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(neuron, ["--help"], terminal_width=200).output
    assert f"broken (neuron-extra): {reason.partition(':')[0]}" in " ".join(shown.split())
    assert re.search(r"^  cache ", shown, re.M)
    done = CliRunner().invoke(neuron, ["hello", "--any", "thing"])
    assert done.exit_code == 1
    assert done.stderr == f"Error: the command 'hello' of neuron-extra: {reason}\n"


def test_a_command_named_like_one_of_ours_does_not_replace_it(site: Path) -> None:
    plant_distribution(site, "neuron-extra", {"doctor": "extra_command:hello"}, extra_command=HELLO)
    done = CliRunner().invoke(neuron, ["doctor"])
    assert done.exit_code == 1 and "neuron-core has a command of this name" in done.stderr


def test_two_packages_with_a_command_of_one_name_are_both_named(site: Path) -> None:
    for name in ("neuron-extra", "neuron-other"):
        plant_distribution(site, name, {"hello": "extra_command:hello"}, extra_command=HELLO)
    done = CliRunner().invoke(neuron, ["hello"])
    assert done.exit_code == 1
    assert (
        "several packages" in done.stderr and "neuron-extra" in done.stderr and "neuron-other" in done.stderr
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**41, "2.0 TiB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (59, "59 s"), (3599, "59 m"), (7200, "2 h"), (90000, "1 d")]
)
def test_ages_for_people(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_json_goes_to_standard_output_alone(tmp_path: Path) -> None:
    (tmp_path / "graphs").mkdir()
    done = run_process("cache", "verify", "--json", "--cache-dir", str(tmp_path))
    assert done.returncode == 0 and json.loads(done.stdout) == {"verified": 0, "bad": {}}
