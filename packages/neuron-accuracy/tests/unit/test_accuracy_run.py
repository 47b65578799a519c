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
from neuron_accuracy.compare.captures import compare_captures
from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Finding, Level, Outcome, Severity, read_outcome, write_outcome
from neuron_accuracy.run.place import first_to_look_at
from neuron_accuracy.run.triage import LEVELS, Roles, Triage
from neuron_accuracy.subjects.open import open_subject, public_text
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
    (outcome,) = triage(model, tmp_path, {}, levels=("kv",)).run()
    assert "holiday is no capture of an earlier run" in outcome.errors[0].detail
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
        (["--option", "baseline.dtype=float32"], "there is no baseline; --baseline KIND:MODEL names one"),
        (["--option", "tset.dtype=float32"], "no such role here; did you mean 'test'"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is(model, tmp_path, arguments, complaint):
    folder = kit.saved(tmp_path / "model", model)
    with pytest.raises(ConfigError, match=complaint):
        CliRunner().invoke(
            cli, ["run", "--test", f"transformers:{folder}", *arguments], catch_exceptions=False
        )


def test_a_run_in_which_no_level_compared_anything_is_no_pass(model, tmp_path):
    folder = kit.saved(tmp_path / "model", model)
    arguments = [
        "run",
        "--test",
        f"transformers:{folder}",
        "--levels",
        "task",
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 2
    assert "could not be compared: no tasks were named; --tasks cloze,arithmetic runs two" in result.output
    nothing = triage(model, tmp_path, {}, levels=("task",))
    summary = nothing.summary(list(nothing.run()))
    assert "no level compared anything" in summary.findings[0].detail and not summary.passed


def test_a_level_that_cannot_be_compared_stops_no_other(model, tmp_path, monkeypatch):
    """Neither a fault found elsewhere nor a pass is lost to it, and it is neither."""

    def refuses(*given: Any, **more: Any) -> Outcome:
        raise AccuracyError("extensions=false leaves out top_k")

    monkeypatch.setattr("neuron_accuracy.run.triage.check_sampling", refuses)
    for faults, code, verdict in (({}, 2, "passed"), ({"lm_head": scaled(2.0)}, 1, "failed")):
        run = triage(model, tmp_path, faults, levels=("task", "prompt", "sampling"))
        outcomes = list(run.run())
        summary = run.summary(outcomes)
        assert (summary.exit_code, summary.passed) == (code, False)
        verdicts = {row["level"]: row["verdict"] for row in summary.data["levels"]}
        assert verdicts == {"task": "left out", "prompt": verdict, "sampling": "could not be compared"}
        assert summary.findings[0].severity is (Severity.FAULT if faults else Severity.ERROR)
        assert Outcome.from_json(summary.to_json()).exit_code == code


def test_two_checkpoints_are_compared_at_every_level(model, tmp_path):
    """Opened from folders, whose weights have digests: that these differ is a note, what comes of it the fault."""
    faulty = copy.deepcopy(model)
    faulty.model.layers[1].mlp.down_proj.weight.data *= 1.5
    folders = [
        kit.saved(tmp_path / name, each, kit.byte_tokenizer()) for name, each in (("a", faulty), ("b", model))
    ]
    test, reference = (open_subject(f"transformers:{folder}") for folder in folders)
    run = Triage(Roles(test, reference), PROMPTS, tmp_path / "out", num_tokens=2, levels=("prompt", "tensor"))
    outcomes = list(run.run())
    assert not any(outcome.errors for outcome in outcomes)
    assert [sum(f.kind == "other weights" for f in outcome.findings) for outcome in outcomes] == [1, 1]
    assert run.summary(outcomes).findings[0].where.startswith("model.layers.1.mlp.down_proj")
    with pytest.raises(AccuracyError, match="different models: revision of the weights"):
        compare_captures(tmp_path / "out" / "captures" / "test", tmp_path / "out" / "captures" / "reference")


def test_a_capture_that_fails_is_not_tried_again(model, tmp_path, monkeypatch):
    tried = []

    def fails(self: Triage, root: Path) -> Any:
        tried.append(root)
        raise AccuracyError("no room")

    monkeypatch.setattr(Triage, "_captured", fails)
    outcomes = list(triage(model, tmp_path, {}, levels=("kv", "tensor")).run())
    assert [outcome.errors[0].detail for outcome in outcomes] == ["no room"] * 2
    assert len(tried) == 1


def test_a_level_that_was_asked_for_by_name_is_not_left_out(model, tmp_path):
    named = triage(model, tmp_path, {}, levels=("task", "prompt"), demanded=("task",))
    assert named.summary(list(named.run())).exit_code == 2


def test_a_run_that_does_not_end_leaves_no_report_of_an_earlier_one(model, tmp_path):
    folder = kit.saved(tmp_path / "model", model)
    run = triage(model, tmp_path / "out", {}, levels=("kv",))
    (outcome,) = run.run()
    run.write([outcome], {})
    write_outcome(outcome, tmp_path / "out" / "kv.json")
    (tmp_path / "out" / "tasks.json").write_text("my own tasks")
    arguments = ["run", "--test", f"transformers:{folder}", "--reference", "transformers:/no/such"]
    result = CliRunner().invoke(cli, [*arguments, "--out", str(tmp_path / "out")])
    assert "no such folder" in str(result.exception)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["captures", "tasks.json"]


def test_a_secret_is_not_echoed():
    for option in ("test.api-key=hush", "api_key=hush", "tset.key=hush"):
        with pytest.raises(ConfigError) as caught:
            CliRunner().invoke(
                cli,
                [
                    "run",
                    "--test",
                    "server:http://localhost:1",
                    "--reference",
                    "transformers:x",
                    "--option",
                    option,
                ],
                catch_exceptions=False,
            )
        assert "…" in str(caught.value) and "hush" not in str(caught.value)
    assert public_text("server:https://me:hush@host:80/v1") == "server:https://host:80/v1"
    assert public_text("transformers:./me@home") == "transformers:./me@home"


def test_a_server_needs_a_reference():
    with pytest.raises(ConfigError, match="must be given for a server; transformers:DIR works"):
        CliRunner().invoke(cli, ["run", "--test", "server:http://localhost:1/v1"], catch_exceptions=False)
