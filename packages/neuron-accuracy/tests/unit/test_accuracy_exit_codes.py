# SPDX-License-Identifier: Apache-2.0
"""Exit code 1 is a fault that was found, and nothing else is."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from neuron_accuracy.cli import main as command
from neuron_accuracy.cli.verdict import say
from neuron_accuracy.findings import Finding, Level, Outcome, Severity

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
assert _spec is not None and _spec.loader is not None
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)


@pytest.fixture
def folder(tmp_path):
    captures.write(tmp_path / "run", {"a": list(range(6))}, {"m:output.0": {"a": torch.randn(6, 8)}})
    return tmp_path / "run"


def exit_code(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["neuron-accuracy", *arguments])
    with pytest.raises(SystemExit) as ended:
        sys.exit(command.main())
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("to", "complaint"),
    [
        (".", "--json"),
        ("capture.json/below.json", "cannot be written"),
        ("/dev/full", "No space left"),
    ],
)
def test_an_outcome_that_cannot_be_written_is_no_verdict(folder, monkeypatch, capsys, to, complaint):
    assert exit_code(monkeypatch, "compare", *[str(folder)] * 2, "--json", str(folder / to)) == 2
    said = capsys.readouterr().err
    assert complaint in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("ours"), 2),
        (click.UsageError("no such option"), 2),
        (OSError("disk"), 2),
    ],
)
def test_what_ends_a_tool_is_no_verdict(monkeypatch, capsys, error, code):
    def ends(name: str) -> click.Command:
        def callback() -> None:
            raise error

        return click.Command("run", callback=callback)

    monkeypatch.setattr(command, "load_command", ends)
    assert exit_code(monkeypatch, "run") == code
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["tasks", "--test", "transformers:x", "--deviating", "/proc/x/y"], "--deviating"),
        (["run", "--test", "transformers:x", "--out", "{file}/x"], "--out"),
        (["report", "{file}", "-o", "{file}/x"], "-o"),
        (["compare", "a", "b", "--json", "/proc/x"], "--json"),
    ],
)
def test_what_is_written_at_the_end_is_tried_before_anything_is_read(
    monkeypatch, capsys, tmp_path, arguments, name
):
    file = tmp_path / "p.jsonl"
    file.touch()
    assert exit_code(monkeypatch, *(word.format(file=file) for word in arguments)) == 2
    assert re.match(rf"Error: {name}=.*cannot be written", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [file], "nothing is left behind"


WHERE = "model.layers.17.self_attn.q_proj:output.0, request prompt-0000-of-the-second-batch"


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_table_cuts_nothing_off_and_takes_nothing_for_markup(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    detail = "after [/INST] and [bold] at position 3 of the request"
    fault = Finding(Level.TENSOR, "diverges", WHERE, detail)
    note = Finding(Level.INPUT, "not compared", "a" * 60 + "[red]" + "b" * 60, "x", Severity.NOTE)
    with pytest.raises(SystemExit) as ended:
        say(Outcome("compare", "Tensors", "./x[bold]", "./[/INST]", [note, fault]), None)
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Tensors: ./x[bold] against ./[/INST]"
    assert f"first: {WHERE}: diverges: {detail}" in lines
    column = "".join(line.split("│")[3].strip() for line in lines if line.startswith("│"))
    assert note.where in column and WHERE.replace(" ", "") in column.replace(" ", "")
    assert "…" not in "".join(lines)


NOISY = """
import os, subprocess, sys, click
from neuron_accuracy.cli import main as command
from neuron_accuracy.cli.verdict import json_option, say
from neuron_accuracy.findings import Outcome

@click.command("run")
@json_option
def run(json_to):
    print("a library's", flush=True)
    os.write(1, b"a compiler's\\n")
    subprocess.run(["echo", "a worker's"])
    say(Outcome("run", "t" * 100_000, "a", "b"), json_to)

command.load_command = lambda name: run
sys.exit(command.main())
"""


def test_standard_output_is_the_outcomes_alone():
    ran = subprocess.run([sys.executable, "-c", NOISY, "run", "--json", "-"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["tool"] == "run"
    assert ran.stderr.splitlines() == ["a library's", "a compiler's", "a worker's"]


@pytest.mark.parametrize("arguments", [(), ("--json", "-")])
def test_a_reader_that_went_away_does_not_change_the_verdict(arguments):
    command = [sys.executable, "-c", NOISY, "run", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        ran.stdout.close()
        said = ran.stderr.read()
    assert ran.returncode == 0 and "Broken" not in said, said


def test_a_reader_of_messages_that_went_away_is_no_fault():
    command = [sys.executable, "-c", NOISY, "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        ran.stderr.close()
        ran.stdout.read()
    assert ran.returncode == 2


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["run", "--help"], 0), (["rnu"], 2)])
def test_help_and_names_end_as_with_any_command(monkeypatch, arguments, code):
    assert exit_code(monkeypatch, *arguments) == code
