# SPDX-License-Identifier: Apache-2.0
"""The support matrix is what the tests' markers and the refusals make of it, in the data file and on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import support_matrix
from support_matrix import MatrixError, Proof
from vllm_neuron.cli.main import vllm_neuron
from vllm_neuron.cli.support import read_matrix


@pytest.fixture(scope="module")
def made():
    return support_matrix.matrix(support_matrix.proofs(), support_matrix.refusals())


def test_data_file_and_page_are_up_to_date(made):
    hint = "run `python tools/support_matrix.py`"
    assert read_matrix() == made, hint
    page = support_matrix.PAGE.read_text()
    assert support_matrix.page(made, page) == page and "| LoRA | refused" in page, hint


def test_every_feature_is_proven_or_refused_and_hardware_is_claimed_nowhere(made):
    for row in made["features"]:
        assert bool(row["refused"]) != any(row["tests"].values()), row["feature"]
    assert made["neuron_device"] == "not run on hardware"


def test_a_named_test_exists_and_says_so_itself(made, request):
    for row in made["features"]:
        for test in (test for tests in row["tests"].values() for test in tests):
            path, _, name = test["test"].partition("::")
            source = (support_matrix.ROOT / path).read_text()
            above = source.partition(f"\ndef {name}(")[0].rpartition("\n\n")[2]
            assert f'@pytest.mark.supports("{row["feature"]}"' in above


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('supports("prefix cashing", model="llama")', "no such feature or model"),
        ('supports("prefix caching", model="lama")', "no such feature or model"),
        ('supports("prefix caching")', "must be supports"),
        ("supports", "must be supports"),
    ],
)
def test_a_marker_that_says_nothing_known_is_an_error(tmp_path, marker, message):
    folder = tmp_path / "packages" / "one" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_one.py").write_text(f"@pytest.mark.{marker}\ndef test_it(): ...\n")
    with pytest.raises(MatrixError, match=message):
        support_matrix.proofs(tmp_path)


def test_markers_are_read_with_what_runs_only_at_night(tmp_path):
    folder = tmp_path / "packages" / "one" / "tests" / "unit"
    folder.mkdir(parents=True)
    marks = '@pytest.mark.nightly\n@pytest.mark.supports("seeds", model="any")\n'
    (folder / "test_one.py").write_text(f"{marks}def test_it(): ...\n\ndef test_other(): ...\n")
    expected = Proof("seeds", "any", "packages/one/tests/unit/test_one.py::test_it", True)
    assert support_matrix.proofs(tmp_path) == [expected]


def test_a_feature_both_refused_and_proven_or_neither_is_an_error():
    proven, refused = support_matrix.proofs(), support_matrix.refusals()
    with pytest.raises(MatrixError, match="'LoRA' is both"):
        support_matrix.matrix([*proven, Proof("LoRA", "llama", "one", False)], refused)
    with pytest.raises(MatrixError, match="'LoRA' is neither"):
        support_matrix.matrix(
            proven, {name: hint for name, hint in refused.items() if name != "--enable-lora"}
        )
    with pytest.raises(MatrixError, match="'seeds' is neither"):
        support_matrix.matrix([proof for proof in proven if proof.feature != "seeds"], refused)


def test_the_command_prints_it_as_tables_and_as_json(made):
    runner = CliRunner()
    assert json.loads(runner.invoke(vllm_neuron, ["support", "--json"]).output) == made
    lines = runner.invoke(vllm_neuron, ["support"]).output.splitlines()
    hint = support_matrix.refusals()["--enable-lora"]
    assert any("LoRA" in line and "--enable-lora" in line and hint in line for line in lines)
    (row,) = (line for line in lines if line.strip().startswith("prefix caching"))
    assert "tests" in row and "not run on hardware" in row
    named = runner.invoke(vllm_neuron, ["support", "--tests"]).output
    assert all(
        test["test"] in named for row in made["features"] for tests in row["tests"].values() for test in tests
    )


def test_an_unknown_command_is_named_with_the_nearest():
    done = CliRunner().invoke(vllm_neuron, ["suport"])
    assert done.exit_code == 2 and "did you mean 'support'?" in done.output


def test_the_console_script_is_declared():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'vllm-neuron = "vllm_neuron.cli.main:main"' in text
