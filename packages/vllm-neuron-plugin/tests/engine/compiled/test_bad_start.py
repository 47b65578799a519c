# SPDX-License-Identifier: Apache-2.0
"""A start that cannot succeed fails at once with a message that says what to change; a cache that cannot be used does
not stop a start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 40,
    "additional_config": {
        "neuron_config": {"compiler": "fx", "prefill_buckets": [256], "decode_buckets": [4]}
    },
}


@pytest.fixture
def checkpoint(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.fixture
def failure(engine_environment: pytest.MonkeyPatch) -> Callable[..., str]:
    """``failure(model, **settings)``: the message with which an engine does not start."""

    def fail(model: Path, **settings: Any) -> str:
        from vllm import LLM

        with pytest.raises(Exception) as caught:
            LLM(str(model), **LIMITS | settings)
        return str(caught.value)

    return fail


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_truncated_file_is_named(checkpoint, failure):
    file = checkpoint / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    message = failure(checkpoint)
    assert str(file) in message and "not a complete safetensors file" in message


def test_a_missing_tensor_is_named(checkpoint, failure):
    name = "model.layers.1.mlp.down_proj.weight"
    edit(checkpoint, lambda tensors: tensors.__delitem__(name))
    assert name in failure(checkpoint)


def test_an_extra_tensor_is_named(checkpoint, failure):
    name = "model.layers.1.mlp.side_proj.weight"
    edit(checkpoint, lambda tensors: tensors.update({name: torch.zeros(2, 2)}))
    assert name in failure(checkpoint)


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint, failure):
    name = "model.layers.0.self_attn.k_proj.weight"
    edit(checkpoint, lambda tensors: tensors.update({name: torch.zeros(32, 60)}))
    message = failure(checkpoint)
    assert name in message and "60" in message and "64" in message


def test_an_architecture_without_a_model_lists_those_with_one(checkpoint, failure):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"architectures": ["GPTNeoXForCausalLM"]}))
    message = failure(checkpoint)
    assert "GPTNeoXForCausalLM" in message
    assert "LlamaForCausalLM" in message and "Qwen3ForCausalLM" in message


def test_too_few_blocks_for_one_request_says_how_many_and_which_flag(tiny_llama, failure):
    message = failure(tiny_llama, num_gpu_blocks_override=10)
    # 256 tokens are 16 blocks, and one more is the null block; 9 blocks hold 144 tokens.
    assert "17" in message and "10" in message
    assert "--num-gpu-blocks-override" in message and "--max-model-len 144" in message


def test_too_little_memory_for_one_request_says_how_much_and_which_flag(tiny_llama, failure):
    # A block is 16 tokens of 2 layers, 2 heads, keys and values of 16 float32: 8 KiB.
    message = failure(tiny_llama, num_gpu_blocks_override=None, kv_cache_memory_bytes=5 * 8192)
    assert "--kv-cache-memory-bytes" in message and "--max-model-len 64" in message


def test_an_unknown_setting_is_named_with_its_neighbour(tiny_llama, failure):
    message = failure(tiny_llama, additional_config={"neuron_config": {"prefil_buckets": [256]}})
    assert "neuron_config.prefil_buckets" in message and "prefill_buckets" in message


SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
print("TOKENS", llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0].token_ids)
"""


# `test_compile_cache.py` has such a cache by default; here the kernels are built anew too.
@pytest.mark.nightly
def test_a_cache_that_cannot_be_written_is_named_and_does_not_stop_the_start(
    tiny_llama, tmp_path, continuations
):
    # Root may write into a read-only directory, but nobody into /proc.
    folder = "/proc/neuron-cache"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_llama), json.dumps(LIMITS)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"VLLM_NEURON_CACHE_DIR": folder, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (expected,) = continuations(tiny_llama, [[5, 6, 7]], 8)
    assert f"TOKENS {expected}" in done.stdout
    assert folder in done.stderr + done.stdout
