# SPDX-License-Identifier: Apache-2.0
"""The command's exit code is the verdict, and its JSON the outcome."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from neuron_accuracy.cli.compare import compare_command
from neuron_accuracy.cli.main import cli
from neuron_accuracy.findings import read_outcome

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

REQUESTS = {"a": list(range(12))}


@pytest.fixture
def folders(tmp_path):
    tensor = torch.randn(12, 8)
    for name, change in (("right", 1.0), ("same", 1.0), ("wrong", 1.1)):
        captures.write(tmp_path / name, REQUESTS, {"m:output.0": {"a": tensor * change}})
    captures.write(tmp_path / "other", REQUESTS, {"m:output.0": {"a": tensor}}, vocab_size=7)
    return tmp_path


def test_the_exit_code_is_the_verdict(folders):
    runner = CliRunner()
    right, same, wrong = (str(folders / name) for name in ("right", "same", "wrong"))
    assert runner.invoke(compare_command, [same, right]).exit_code == 0
    failed = runner.invoke(compare_command, [wrong, right, "--json", str(folders / "out.json")])
    assert failed.exit_code == 1
    assert "m:output.0" in failed.output and "failed: 1 fault" in failed.output
    outcome = read_outcome(folders / "out.json")
    assert outcome.faults[0].kind == "diverges" and outcome.data["first"] == "m:output.0"


def test_json_on_standard_output_is_all_there_is(folders):
    result = CliRunner().invoke(
        compare_command,
        [str(folders / "same"), str(folders / "right"), "--baseline", str(folders / "right"), "--json", "-"],
    )
    assert json.loads(result.stdout)["data"]["mode"] == "three-way"


def test_what_cannot_be_compared_is_one_line_and_exit_code_2(folders):
    script = "import sys; sys.argv[0] = 'neuron-accuracy'; from neuron_accuracy.cli.main import main; main()"
    arguments = ["compare", str(folders / "other"), str(folders / "right")]
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert result.stderr.startswith("Error: the captures are of different models: vocabulary size 7")
    assert len(result.stderr.splitlines()) == 1


def test_the_group_knows_the_command():
    assert CliRunner().invoke(cli, ["compare", "--help"]).exit_code == 0
