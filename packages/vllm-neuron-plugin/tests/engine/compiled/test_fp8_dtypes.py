# SPDX-License-Identifier: Apache-2.0
"""Case F2 (vllm-project/vllm#42587): no ``--kv-cache-dtype`` that vLLM takes gets past the start and then fails.

Each value of vLLM's own type either works or is refused in one line that lists what works, before weights are read.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.config.cache import CacheDType

WORKS = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""What a bfloat16 model takes, and what its cache then holds."""

BUCKETS = {"neuron_config": {"compiler": "fx", "prefill_buckets": [64], "decode_buckets": [2]}}
CACHE_BYTES = 1 << 20
LIMITS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": CACHE_BYTES,
    "additional_config": BUCKETS,
}
UNREADABLE = "not a complete safetensors file"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def unreadable(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a weight file that no loader can read."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path_factory.mktemp("unreadable") / "model"))
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


def check_refusal(message: str, value: str) -> None:
    """One line of ``message`` names the setting, the value and every value that works."""
    (line,) = (line for line in message.splitlines() if "--kv-cache-dtype" in line)
    assert f"--kv-cache-dtype='{value}': the cache holds the model's own type (bfloat16)" in line
    assert f"use {' or '.join(WORKS)}" in line
    assert UNREADABLE not in message


@pytest.mark.parametrize("value", get_args(CacheDType))
def test_f2_a_value_works_or_is_refused_before_weights(engines, unreadable, tiny_llama, value):
    with pytest.raises(Exception) as caught:
        LLM(str(unreadable), **LIMITS, kv_cache_dtype=value)
    if value not in WORKS:
        check_refusal(str(caught.value), value)
        return
    assert UNREADABLE in str(caught.value)
    engine = engines(tiny_llama, **LIMITS, kv_cache_dtype=value)
    assert {cache.dtype for cache in engine.runner.executor.kv_tensors} == {WORKS[value]}
    (tokens,) = engine.tokens([[5, 6, 7]], GREEDY)
    assert len(tokens) == 4


def test_what_works_is_what_vllm_knows():
    assert set(WORKS) <= set(get_args(CacheDType))


def test_twice_as_many_fp8_blocks_fit_into_the_same_memory(engines, tiny_llama):
    blocks = {}
    for value in ("auto", "fp8"):
        engine = engines(tiny_llama, **LIMITS, kv_cache_dtype=value)
        blocks[value] = engine.engine.vllm_config.cache_config.num_gpu_blocks
        assert sum(cache.nbytes for cache in engine.runner.executor.kv_tensors) <= CACHE_BYTES
    # A block of bfloat16 is 16 tokens of 2 layers, 2 heads, keys and values of 16 numbers.
    assert blocks["auto"] == CACHE_BYTES // (16 * 2 * 2 * 2 * 16 * 2)
    assert abs(blocks["fp8"] - 2 * blocks["auto"]) <= 1


def serve(model: Path, port: int, log: Path, cache: Path, value: str) -> subprocess.Popen[bytes]:
    variables = {name: text for name, text in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    # fmt: off
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port),
        "--kv-cache-dtype", value, "--dtype", "bfloat16", "--max-model-len", "64", "--max-num-seqs", "2",
        "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", str(CACHE_BYTES),
        "--additional-config", json.dumps(BUCKETS),
    ]
    # fmt: on
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables | {"VLLM_NEURON_CACHE_DIR": str(cache)},
            start_new_session=True,
        )


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.nightly
@pytest.mark.parametrize("value", ["fp8_e5m2", "turboquant_k8v4"])
def test_f2_a_server_refuses_a_value_in_one_line(unreadable, graph_cache, tmp_path, port, value):
    log = tmp_path / "serve.log"
    process = serve(unreadable, port, log, graph_cache, value)
    try:
        assert process.wait(240) != 0
    finally:
        end(process)
    check_refusal(log.read_text(), value)


@pytest.mark.nightly
def test_f2_a_server_with_an_fp8_cache_answers_a_completion(tiny_llama, graph_cache, tmp_path, port):
    log = tmp_path / "serve.log"
    process = serve(tiny_llama, port, log, graph_cache, "fp8")
    try:
        body = {"model": str(tiny_llama), "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        answer = ask(process, port, body, log)
        assert answer["usage"]["completion_tokens"] == 4
        # Not after the end: vLLM's server may log the engine it kills as one that died.
        assert "Traceback" not in log.read_text()
    finally:
        end(process)


def ask(process: subprocess.Popen[bytes], port: int, body: dict[str, Any], log: Path) -> dict[str, Any]:
    """The answer to a completion, asked for until the server is there."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            answer: dict[str, Any] = json.load(urllib.request.urlopen(request, timeout=60))
            return answer
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.25)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
