# SPDX-License-Identifier: Apache-2.0
"""What cannot fit is refused from the configuration alone: no weight file is opened for it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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

# A block is 16 tokens of 2 layers, 2 heads, keys and values of 16 float32.
BLOCK = 16 * 2 * 2 * 2 * 16 * 4

UNREADABLE = "not a complete safetensors file"


@pytest.fixture
def unreadable(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny model with a weight file that no loader can read."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


@pytest.fixture
def failure(engine_environment: pytest.MonkeyPatch) -> Callable[..., str]:
    """``failure(model, **settings)``: the message with which an engine does not start."""

    def fail(model: Path, **settings: Any) -> str:
        from vllm import LLM

        with pytest.raises(Exception) as caught:
            LLM(str(model), **LIMITS | settings)
        return f"{type(caught.value).__name__}: {caught.value}"

    return fail


@pytest.mark.supports("memory estimate before weights", model="llama")
def test_weights_are_read_only_when_the_estimate_fits(unreadable, failure):
    assert UNREADABLE in failure(unreadable)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 5 * BLOCK},
            ("--max-model-len 64 works", f"--kv-cache-memory-bytes {17 * BLOCK}"),
        ),
        ({"num_gpu_blocks_override": 10}, ("--max-model-len 144 works", "--num-gpu-blocks-override to 17")),
        ({"num_gpu_blocks_override": 10**9}, ("--num-gpu-blocks-override 1000000000 (", "is free")),
        ({"num_gpu_blocks_override": 0}, ("--num-gpu-blocks-override=0: must be at least 2",)),
        (
            {"num_gpu_blocks_override": 20, "kv_cache_memory_bytes": 19 * BLOCK},
            ("--num-gpu-blocks-override 20", "--num-gpu-blocks-override 19 works"),
        ),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 50},
            ("--kv-cache-memory-bytes 1125899906842624", "is more than is free"),
        ),
        (
            {"num_gpu_blocks_override": None, "gpu_memory_utilization": 1e-4},
            ("no --max-model-len works", "--gpu-memory-utilization to 0."),
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_cache_that_cannot_hold_one_request_is_refused_before_weights(
    unreadable, failure, settings, expected
):
    message = failure(unreadable, **settings)
    assert UNREADABLE not in message
    for part in expected:
        assert part in message


def test_weights_that_do_not_fit_are_refused_before_they_are_read(unreadable, failure):
    config = json.loads((unreadable / "config.json").read_text())
    rows = 1 << 36  # of 64 float32, twice: 32 TiB
    (unreadable / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    message = failure(unreadable)
    assert UNREADABLE not in message
    assert "CapacityError: The weights do not fit" in message and "short by" in message
    assert f"{2 * rows * 64 * 4 / 1024**3:.1f} GiB" in message
    assert "--tensor-parallel-size" in message


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Messages of the plugin's loggers; vLLM's do not propagate to pytest's."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep()
    logging.getLogger("vllm").addHandler(handler)
    yield messages
    logging.getLogger("vllm").removeHandler(handler)


def test_a_start_logs_estimate_budget_and_speed(tiny_llama, engine_environment, log):
    from vllm import LLM

    llm = LLM(str(tiny_llama), **LIMITS)
    text = "\n".join(log)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    weights = sum(parameter.nbytes for parameter in worker.get_model().parameters())
    for part in (
        "Memory estimate before loading:",
        "one request of 256 tokens (17 blocks)",
        "Memory budget:",
        "free after loading weights",
        "KV cache (by --num-gpu-blocks-override)",
        f"loaded {weights / 1e9:.2f} GB of weights in",
        "parameters read in",
    ):
        assert part in text
    terms = [line.split()[2:] for line in text.splitlines() if "activation headroom" in line]
    assert len(terms) == 2 and terms[0] == terms[1] != ["0", "B"]
    (blocks,) = [line.split()[-1] for line in text.splitlines() if "blocks, the null block" in line]
    cache = worker.runner.executor.kv_tensors
    assert int(blocks) == 40 == len(cache[0])
    (row,) = [line.split() for line in text.splitlines() if "KV cache (by --num-gpu" in line]
    assert float(row[-2]) == round(sum(tensor.nbytes for tensor in cache) / 1024, 1) and row[-1] == "KiB"
