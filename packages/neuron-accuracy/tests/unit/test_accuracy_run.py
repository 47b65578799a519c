# SPDX-License-Identifier: Apache-2.0
"""All levels over two models of transformers: what is named first, what is left out, and what is not overwritten."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from neuron_accuracy.cli.main import cli
from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Finding, Level, Outcome, Severity, read_outcome
from neuron_accuracy.run.place import first_to_look_at
from neuron_accuracy.run.triage import LEVELS, Roles, Triage
from neuron_accuracy.subjects.transformers import TransformersSubject
from neuron_core.errors import ConfigError

_spec = importlib.util.spec_from_file_location("accuracy_kit", Path(__file__).parents[1] / "accuracy_kit.py")
assert _spec is not None and _spec.loader is not None
kit = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kit)

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]


@pytest.fixture(scope="module")
def model() -> Any:
    return kit.tiny_llama()


def triage(model: Any, folder: Path, faults: dict[str, Any], **more: Any) -> Triage:
    faulty = copy.deepcopy(model)
    for name, fault in faults.items():
        faulty.get_submodule(name).register_forward_hook(fault)
    roles = Roles(TransformersSubject.of(faulty), TransformersSubject.of(model))
    return Triage(roles, PROMPTS, folder, num_tokens=3, **more)


def scaled(factor: float) -> Any:
    return lambda module, inputs, output: output * factor


def test_a_run_without_a_fault_passes_and_says_what_was_left_out(model, tmp_path):
    run = triage(model, tmp_path, {})
    outcomes = list(run.run())
    summary = run.summary(outcomes)
    assert summary.passed
    assert summary.data["first"] is None
    verdicts = {row["level"]: row["verdict"] for row in summary.data["levels"]}
    assert verdicts == {"task": "left out"} | dict.fromkeys(LEVELS[1:], "passed")
    assert run.write(outcomes, {}).stat().st_size > 10_000


def test_of_two_faulty_modules_the_first_that_ran_is_first(model, tmp_path):
    """One that makes a difference between runs, and before it one that only loses precision."""

    def narrow(module: Any, inputs: Any, output: Any) -> Any:
        return output.bfloat16().float()

    faults = {"model.layers.1.mlp.down_proj": scaled(1.1), "model.layers.0.self_attn.q_proj": narrow}
    run = triage(model, tmp_path, faults, levels=("tensor",))
    (outcome,) = run.run()
    wheres = [finding.where.partition(":")[0] for finding in outcome.faults]
    assert wheres[0] == "model.layers.0.self_attn.q_proj"
    assert "model.layers.1.mlp.down_proj" in wheres
    assert {row["module"]: row["passes"] for row in outcome.data["own_errors"]}["lm_head"]


def test_captures_of_an_earlier_run_are_replaced_and_nothing_else_is(model, tmp_path):
    for _ in range(2):
        assert [outcome.passed for outcome in triage(model, tmp_path, {}, levels=("kv",)).run()] == [True]
    mine = tmp_path / "captures" / "holiday"
    mine.mkdir()
    (mine / "picture.jpg").write_text("sunset")
    with pytest.raises(AccuracyError, match="holiday is no capture of an earlier run"):
        list(triage(model, tmp_path, {}, levels=("kv",)).run())
    assert (mine / "picture.jpg").exists()


def test_the_narrowest_named_fault_is_looked_at_first():
    def outcome(*findings: Finding) -> Outcome:
        return Outcome("x", "x", "a", "b", findings)

    prompt = Finding(Level.PROMPT, "diverges", "prompt 0", "")
    cache = Finding(Level.KV, "diverges", "layer 3", "")
    swapped = Finding(Level.KV, "swapped heads", "layer 0", "")
    tensor = Finding(Level.TENSOR, "diverges", "model.layers.1", "")
    note = Finding(Level.INPUT, "not compared", "x", "", Severity.NOTE)
    given = Finding(Level.INPUT, "tokens part", "r", "")
    assert first_to_look_at([outcome(note)]) is None
    assert first_to_look_at([outcome(note, prompt)]) is prompt
    assert first_to_look_at([outcome(prompt), outcome(cache), outcome(tensor)]) is tensor
    assert first_to_look_at([outcome(prompt), outcome(cache, swapped), outcome(tensor)]) is swapped
    assert first_to_look_at([outcome(swapped), outcome(given)]) is given


def test_the_command_takes_the_reference_from_the_test_and_its_verdict_as_exit_code(model, tmp_path):
    folder = kit.saved(tmp_path / "model", model, kit.byte_tokenizer())
    out = tmp_path / "out"
    arguments = ["run", "--test", f"transformers:{folder}", "--option", "test.dtype=bfloat16"]
    arguments += ["--num-prompts", "2", "--tokens", "3", "--levels", "prompt,kv,tensor", "--out", str(out)]
    result = CliRunner().invoke(cli, [*arguments, "--json", str(tmp_path / "run.json")])
    assert result.exit_code == 0, result.output
    summary = read_outcome(tmp_path / "run.json")
    assert "float32" in summary.reference, "a baseline in full precision"
    assert {path.name for path in (out / "captures").iterdir()} == {"test", "reference", "baseline"}
    assert json.loads((out / "compare.json").read_text())["data"]["mode"] == "three-way"
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--levels", "tensors"], "no such level; did you mean 'tensor'"),
        (["--levels", ","], "names no level"),
        (["--thresholds", "x.toml"], "names no task to limit"),
        (["--option", "tset.dtype=float32"], "no such role here; did you mean 'test'"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is(model, tmp_path, arguments, complaint):
    folder = kit.saved(tmp_path / "model", model)
    with pytest.raises(ConfigError, match=complaint):
        CliRunner().invoke(
            cli, ["run", "--test", f"transformers:{folder}", *arguments], catch_exceptions=False
        )


def test_a_server_needs_a_reference():
    with pytest.raises(ConfigError, match="must be given for a server; transformers:DIR works"):
        CliRunner().invoke(cli, ["run", "--test", "server:http://localhost:1/v1"], catch_exceptions=False)
