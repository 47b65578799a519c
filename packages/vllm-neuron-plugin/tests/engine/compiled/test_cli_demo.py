# SPDX-License-Identifier: Apache-2.0
"""``vllm-neuron demo`` as a newcomer starts it; and ``vllm-neuron config`` knows which graphs that left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

NO_NETWORK = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
WITHOUT_SMOLLM2 = """
import sys
import vllm_neuron.cli.demo_model as model
from vllm_neuron.cli.main import vllm_neuron

model.PACKAGE = "no_such_package"
vllm_neuron(sys.argv[1:], prog_name="vllm-neuron")
"""
BLOCK = 16


def run(*command: object, cache: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    settings = {"VLLM_NEURON_DEVICE": "cpu", "VLLM_NEURON_CACHE_DIR": str(cache), **environ}
    words = [sys.executable, *(str(word) for word in command)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=400, check=False, env={**os.environ, **settings}
    )


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def shown(smollm2: Path, graph_cache: Path) -> dict[str, Any]:
    return document(run("-m", "vllm_neuron.cli", "demo", "--model", smollm2, "--json", cache=graph_cache))


@pytest.mark.nightly
def test_the_demo_answers_and_its_figures_are_those_of_the_text(shown, smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    answer = tokenizer.encode(shown["text"], add_special_tokens=False)
    assert "Paris" in shown["text"] and not shown["random_weights"]
    first, again = shown["first"], shown["again"]
    # The last token ends the answer and is no text.
    assert (first["prompt_tokens"], first["tokens"]) == (len(prompt), len(answer) + 1)
    assert (again["prompt_tokens"], again["tokens"]) == (len(prompt), len(answer) + 1)
    assert (first["cached_tokens"], again["cached_tokens"]) == (0, (len(prompt) - 1) // BLOCK * BLOCK)
    # Two prompts of one step each, and for either a step per token after the first.
    assert shown["buckets_used"] == {"prefill_s64": 2, "decode_b1": 2 * len(answer)}
    assert set(shown["buckets_used"]) < set(shown["buckets"])
    assert first["first_token_s"] > 0 and first["tokens_per_s"] > 0


@pytest.mark.nightly
def test_the_configuration_knows_which_buckets_a_server_would_find(shown, smollm2, engine_environment):
    """As the demo's engine, and three requests at once, which it had no bucket for."""
    from vllm_neuron.cli.arguments import engine_config
    from vllm_neuron.cli.weights_free import ready_buckets

    buckets = {"prefill_buckets": [64, 256], "decode_buckets": [1, 3], "max_prefill_seqs": 1}
    limits = ["--max-model-len", "256", "--max-num-batched-tokens", "256", "--max-num-seqs", "3"]
    words = [*limits, "--additional-config", json.dumps({"neuron_config": buckets})]
    found = ready_buckets(engine_config(str(smollm2), words))
    assert found == dict.fromkeys(shown["buckets"], True) | {"decode_b3": False}


@pytest.mark.nightly
def test_without_network_and_model_a_random_one_answers_in_two_minutes_and_compiles_once(tmp_path):
    begun = time.monotonic()
    cold = run("-c", WITHOUT_SMOLLM2, "demo", cache=tmp_path, **NO_NETWORK)
    assert time.monotonic() - begun < 120
    assert cold.returncode == 0, cold.stderr[-3000:]
    assert "made on the spot" in cold.stdout and "the text means nothing" in cold.stdout
    assert "vllm serve" in cold.stdout and "0 loaded from" in cold.stdout
    warm = document(run("-c", WITHOUT_SMOLLM2, "demo", "--json", cache=tmp_path, **NO_NETWORK))
    assert warm["random_weights"] and warm["graphs_compiled"] == 0 < warm["graphs_loaded"]
    # Control characters are shown as dots: a terminal would obey them.
    shown = "".join(char if char.isprintable() or char == "\n" else "·" for char in warm["text"])
    assert shown in cold.stdout and len(warm["text"]) > 8


@pytest.mark.nightly
@pytest.mark.nightly
def test_an_answer_longer_than_the_model_takes_is_refused_with_what_works(smollm2, tmp_path):
    limits = ["--max-model-len", "64", "--max-tokens", "60"]
    failed = run("-m", "vllm_neuron.cli", "demo", "--model", smollm2, *limits, cache=tmp_path)
    assert failed.returncode == 1
    assert re.search(r"Error: --max-tokens=60: .*; --max-model-len \d+ works", failed.stderr.splitlines()[-1])


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    failed = run("-m", "vllm_neuron.cli", "demo", "--model", tmp_path / "nothing", cache=tmp_path)
    assert failed.returncode == 1
    assert (
        failed.stderr.splitlines()[-1].startswith("Error: ") and "nothing" in failed.stderr.splitlines()[-1]
    )
