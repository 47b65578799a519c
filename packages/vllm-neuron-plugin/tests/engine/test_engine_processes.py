# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own: they answer alike and stop cleanly, or refuse before weights load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, arguments = sys.argv[1], json.loads(sys.argv[2])
    limits = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    llm = LLM(model, dtype="float32", num_gpu_blocks_override=11, **limits, **arguments)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [[5, 6, 7], [*range(10, 50)]]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""
FX = {"neuron_config": {"compiler": "fx"}}


def run(folder: Path, model: Path, **arguments: object) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return subprocess.run(
        [sys.executable, str(script), str(model), json.dumps({"additional_config": FX} | arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )


def tokens_of(done: subprocess.CompletedProcess[str]) -> list[list[int]]:
    line = next(line for line in done.stdout.splitlines() if line.startswith("TOKENS"))
    return json.loads(line.removeprefix("TOKENS"))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="one-rank"),
        # All three run in the processes of other default tests; here they would add a start each.
        pytest.param({"tensor_parallel_size": 2}, id="two-ranks", marks=pytest.mark.nightly),
        pytest.param({"async_scheduling": True}, id="asynchronous", marks=pytest.mark.nightly),
        pytest.param({"block_size": 32}, id="blocks-of-32", marks=pytest.mark.nightly),
    ],
)
def test_same_tokens_and_a_clean_stop(tiny_llama, tmp_path, reference, arguments):
    done = run(tmp_path, tiny_llama, **arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    assert tokens_of(done) == [reference([5, 6, 7], 8), reference([*range(10, 50)], 8)]
    # vLLM's shutdown calls torch.accelerator, which raises where there is none: the engine would die of it.
    assert "accelerator" not in done.stderr.lower() and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"additional_config": {"neuron_config": {"prefil_buckets": [64]}}},
            "did you mean 'prefill_buckets'?",
            id="unknown-key",
        ),
        # test_refused_settings.py has these two, and every other, without a process each.
        pytest.param({"pipeline_parallel_size": 2}, "ipeline", id="pipeline", marks=pytest.mark.nightly),
        pytest.param({"enable_lora": True}, "--enable-lora", id="lora", marks=pytest.mark.nightly),
    ],
)
def test_refused_before_weights_load(tiny_llama, tmp_path, arguments, message):
    done = run(tmp_path, tiny_llama, **arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "loaded" not in (done.stdout + done.stderr)
