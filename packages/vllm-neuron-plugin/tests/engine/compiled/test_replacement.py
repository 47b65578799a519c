# SPDX-License-Identifier: Apache-2.0
"""Outputs of an engine's modules taken from a run of transformers, and the faulty module found by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.replace.bisect import bisect, disagreement
from neuron_accuracy.subjects.open import open_subject
from neuron_core.errors import ConfigError

FAULTS = Path(__file__).parents[2] / "faults"
PROMPTS = [[3 + (7 * i) % 250 for i in range(length)] for length in (40, 5)]
TOKENS = [[9, 8, 7], [6, 5, 4]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,  # the longer prompt comes in two chunks
    "num_gpu_blocks_override": 40,
    "skip_tokenizer_init": True,
    "additional_config": {
        "neuron_config": {"compiler": "fx", "prefill_buckets": [32], "decode_buckets": [4]}
    },
}


@pytest.fixture(scope="module")
def reference(tiny_qwen3, tmp_path_factory) -> tuple[Path, Any]:
    subject = open_subject(f"transformers:{tiny_qwen3}", {})
    folder = tmp_path_factory.mktemp("replacement") / "reference"
    subject.capture(PROMPTS, TOKENS, CaptureSpec(("**",), ("output.*", "input.0")), folder)
    return folder, subject.force(PROMPTS, TOKENS, 0)


@pytest.mark.supports("bisection", model="qwen3")
def test_the_faulty_module_of_an_engine_is_found(engine_environment, tiny_qwen3, reference, monkeypatch):
    """A slice of a fused projection, which transformers has as three."""
    from vllm_neuron import worker

    fill = worker.fill_weights

    @torch.no_grad()
    def filled(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = fill(model, *args, **kwargs)
        model.model.layers[1].self_attn.qkv_proj.weight[-5] *= 1.5
        return result

    monkeypatch.setattr(worker, "fill_weights", filled)
    folder, expected = reference
    subject = open_subject(f"vllm-neuron:{tiny_qwen3}", OPTIONS)
    outcome = bisect(subject, expected, folder, PROMPTS, TOKENS, limit=1e-4)
    assert outcome.data["module"] == "model.layers.1.self_attn.qkv_proj"
    assert outcome.data["alone"] < 1e-5

    everything = subject.candidates(folder, ("**",))
    for module in everything:
        scores = subject.force_replaced(PROMPTS, TOKENS, folder, ("**",), [module])
        before_the_fault = everything.index(module) < everything.index("model.layers.1.self_attn.qkv_proj")
        if before_the_fault:
            assert disagreement(scores, expected) > 1e-4, f"{module} is right, replacing it mends nothing"
    with pytest.raises(ConfigError, match=r"cannot be replaced here; did you mean 'model\.norm'"):
        subject.force_replaced(PROMPTS, TOKENS, folder, ("**",), ["model.nrm"])
    subject.close()


@pytest.mark.nightly
def test_the_faulty_module_of_two_ranks_is_found_by_the_command(three_layer_llama, graph_cache, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(graph_cache / "kernels")
    environment = {
        **os.environ,
        "PLANTED_FAULT": "weight_row",
        "PYTHONPATH": str(FAULTS),
        "VLLM_NEURON_CACHE_DIR": str(cache),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    options = {**OPTIONS, "tensor_parallel_size": 2, "skip_tokenizer_init": False}
    given = [
        word
        for name, value in options.items()
        for word in ("--option", f"test.{name}={value if isinstance(value, str) else json.dumps(value)}")
    ]
    command = ["bisect", "--test", f"vllm-neuron:{three_layer_llama}", *given, "--json", "-"]
    program = "from neuron_accuracy.cli.main import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", program, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr[-3000:]
    outcome = json.loads(ran.stdout[ran.stdout.index('{\n "format"') :])
    assert outcome["data"]["module"] == "model.layers.1.mlp.down_proj"


@pytest.fixture
def three_layer_llama(write_models, tmp_path) -> Path:
    return write_models[0](tmp_path / "llama", num_hidden_layers=3)


@pytest.mark.parametrize(
    ("replacement", "complaint"),
    [
        ({"folder": "nowhere", "modules": ["*"]}, "holds no capture"),
        ({"folder": "x", "modules": []}, "must be a list of patterns"),
        ({"folder": "x", "module": ["*"]}, "unknown key; did you mean 'modules'"),
    ],
)
def test_a_replacement_setting_that_cannot_be_is_refused(replacement, complaint):
    from vllm_neuron.config import NeuronConfig

    with pytest.raises(ConfigError, match=complaint):
        NeuronConfig.from_additional_config({"neuron_config": {"tensor_replacement": replacement}})
