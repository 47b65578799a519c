# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an engine's graphs, and running them again in a process that has neither engine nor model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from neuron_accuracy.errors import CaptureError
from neuron_accuracy.snapshots.store import find_calls, read_call
from neuron_core.errors import ConfigError

PROMPTS = [[3 + (7 * i) % 250 for i in range(length)] for length in (40, 5)]
PROGRAM = "from neuron_accuracy.cli.main import main; main()"


def settings(**snapshots: Any) -> dict[str, Any]:
    section = {"prefill_buckets": [64], "decode_buckets": [4], "compiler": "fx", "input_snapshots": snapshots}
    return {
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 24,
        "additional_config": {"neuron_config": section},
    }


@pytest.fixture
def replay(graph_cache: Path, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """The command's exit code, its outcome and what it printed on standard error."""

    def replay(folder: Path, compiler: str) -> tuple[int, dict[str, Any], str]:
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            "replay",
            str(folder),
            "--compiler",
            compiler,
            "--json",
            "-",
        ]
        environment = {**os.environ, "VLLM_NEURON_CACHE_DIR": str(graph_cache)}
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=environment
        )
        return ran.returncode, json.loads(ran.stdout) if ran.stdout else {}, ran.stderr

    return replay


@pytest.fixture(scope="module")
def taken(engines, tiny_llama, tmp_path_factory) -> Path:
    from vllm import SamplingParams

    folder = tmp_path_factory.mktemp("snapshots")
    engine = engines(
        tiny_llama, **settings(folder=str(folder), steps=[0], requests=["r1-*"], max_snapshots=3)
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.run(PROMPTS, params)
    return folder


@pytest.mark.supports("input snapshots", model="llama")
def test_the_selected_steps_are_kept_with_why(taken):
    calls = [read_call(folder) for folder in find_calls(taken)]
    assert [call.record.part for call in calls] == ["embed", "layer.0", "layer.1", "greedy"] * 3
    assert {call.record.step for call in calls} == {0, 1, 2}, "the first three that a rule selects"
    first = calls[0].record
    assert first.bucket == "prefill_s64"
    assert first.selected_by[0] == "step 0"
    assert first.selected_by[1].startswith("request r1-")
    layer = calls[1]
    cache = layer.record.names.index("kv.0")
    assert layer.record.changed == (cache,), "the layer writes its cache and nothing else"
    assert not torch.equal(layer.inputs[cache], layer.outputs[f"input.{cache}"])
    ids = calls[0].inputs[calls[0].record.names.index("token_ids")]
    assert ids[:45].tolist() == PROMPTS[0] + PROMPTS[1]


@pytest.mark.parametrize("compiler", ["fx", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_replay_gives_what_the_engine_gave(taken, replay, compiler):
    code, outcome, _ = replay(taken, compiler)
    assert code == 0, outcome["findings"]
    rows = outcome["data"]["calls"]
    assert len(rows) > 20
    if compiler == "fx":
        assert all(row["equal"] for row in rows)


def test_a_replay_of_other_weights_fails_at_its_part(taken, replay, tmp_path):
    """One weight of one stored layer is changed, and the digest with it, as a fault in a graph would be."""
    import hashlib
    import shutil

    folder = tmp_path / "changed"
    shutil.copytree(taken / "step0", folder)
    call = folder / "layer.1" / "rank0"
    inputs = load_file(call / "inputs.safetensors")
    names = json.loads((call / "call.json").read_text())["names"]
    weight = str(names.index(next(name for name in names if "down_proj" in name)))
    inputs[weight] = inputs[weight] * 1.5
    save_file(inputs, call / "inputs.safetensors")
    record = json.loads((call / "call.json").read_text())
    record["digests"]["inputs.safetensors"] = hashlib.sha256(
        (call / "inputs.safetensors").read_bytes()
    ).hexdigest()
    (call / "call.json").write_text(json.dumps(record))
    code, outcome, _ = replay(folder, "fx")
    assert code == 1
    assert {finding["where"].split(",")[1].strip() for finding in outcome["findings"]} == {"part layer.1"}


def test_a_damaged_snapshot_is_named(taken, replay, tmp_path):
    import shutil

    folder = tmp_path / "cut"
    shutil.copytree(taken / "step1", folder)
    file = folder / "layer.0" / "rank0" / "outputs.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    code, _, error = replay(folder, "fx")
    assert code == 2
    assert "layer.0/rank0/outputs.safetensors is not what was written" in error
    (folder / "layer.0" / "rank0" / "graph.py").unlink()
    with pytest.raises(CaptureError, match=r"graph\.py is missing"):
        read_call(folder / "layer.0" / "rank0")
    with pytest.raises(CaptureError, match="holds no snapshot"):
        find_calls(tmp_path / "cut" / "layer.0" / "nothing")


def test_snapshots_that_grow_too_large_say_so(engines, tiny_llama, tmp_path):
    from vllm import SamplingParams

    engine = engines(tiny_llama, **settings(folder=str(tmp_path), steps=[0, 1], max_bytes=60_000))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert all(len(tokens) == 4 for tokens in engine.tokens(PROMPTS, params)), "it goes on serving"
    (problem,) = engine.llm.collective_rpc("end_observation")
    assert "beyond input_snapshots.max_bytes=60000; name fewer parts" in problem
    assert [call.name for call in (tmp_path / "step0").iterdir()] == ["embed"], "what fitted is there"


@pytest.mark.parametrize(
    ("snapshots", "complaint"),
    [
        ({"folder": "x"}, "nothing selects a step"),
        ({"folder": "x", "steps": ["1"]}, "must be a list of int"),
        ({"folder": "x", "step": [1]}, "unknown key; did you mean 'steps'"),
        ({"steps": [1]}, "must name a folder"),
        ({"folder": "x", "steps": [1], "max_snapshots": 0}, "must be a whole number of at least 1; 4 works"),
    ],
)
def test_a_snapshot_setting_that_cannot_be_is_refused(snapshots, complaint):
    from vllm_neuron.config import NeuronConfig

    with pytest.raises(ConfigError, match=complaint):
        NeuronConfig.from_additional_config({"neuron_config": {"input_snapshots": snapshots}})
