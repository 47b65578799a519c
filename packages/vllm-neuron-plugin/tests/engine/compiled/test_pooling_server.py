# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm serve --runner pooling`` on the CPU device, asked through the ``openai`` client and plain HTTP."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
BUCKETS = '{"neuron_config": {"prefill_buckets": [32, 96], "max_prefill_seqs": 6}}'
# fmt: off
LIMITS = [
    "--runner", "pooling", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16",
    "--max-num-batched-tokens", "96", "--num-gpu-blocks-override", "200", "--additional-config", BUCKETS,
    "--served-model-name", "tiny", "--async-scheduling",
]
# fmt: on
READY_TIMEOUT_S = 300.0
TEXTS = [
    "A text.",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "Another text, of another length.",
]


@dataclass
class Server:
    """A running server and the folder of its model."""

    url: str
    model: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and answer of a request."""
        data = json.dumps({"model": "tiny", **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as a checkpoint that allows two sizes of its embeddings."""
    folder = tmp_path_factory.mktemp("tiny-llama-embedding")
    for file in tiny_llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [8, 32]}))
    return folder


@pytest.fixture(scope="module")
def server(model: Path, graph_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("pooling-server") / "serve.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    ours |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_NEURON_CACHE_DIR": str(graph_cache)}
    with log.open("wb") as output:
        command = [*SERVE, str(model), "--port", str(port), *LIMITS]
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=ours, start_new_session=True
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_TIMEOUT_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.25)
        yield Server(url, model)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in log.read_text()


@torch.no_grad()
def last_hidden(folder: Path, text: str) -> torch.Tensor:
    from transformers import AutoModel, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder).encode(text)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.tensor([ids])).last_hidden_state[0, -1]


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().sum().sqrt()


@pytest.mark.nightly
@pytest.mark.supports("pooling models", model="llama")
def test_embeddings_are_those_of_transformers(server):
    answer = server.client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    for text, item in zip(TEXTS, answer.data, strict=True):
        expected = unit(last_hidden(server.model, text))
        torch.testing.assert_close(torch.tensor(item.embedding), expected, rtol=0, atol=2e-5)
    assert answer.usage.prompt_tokens == sum(map(len, TEXTS))


@pytest.mark.nightly
def test_dimensions_are_cut_and_normalised(server):
    (item,) = server.client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8).data
    torch.testing.assert_close(
        torch.tensor(item.embedding), unit(last_hidden(server.model, TEXTS[0])[:8]), rtol=0, atol=2e-5
    )


@pytest.mark.nightly
def test_base64_holds_the_same_numbers(server):
    settings = {"model": "tiny", "input": TEXTS[2]}
    floats = server.client.embeddings.create(**settings, encoding_format="float").data[0].embedding
    status, text = server.post("/v1/embeddings", input=TEXTS[2], encoding_format="base64")
    coded = json.loads(text)["data"][0]["embedding"]
    assert status == 200
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), np.float32), floats, atol=1e-6)


@pytest.mark.nightly
def test_scores_are_cosines_of_embeddings(server):
    status, text = server.post("/score", queries=TEXTS[0], documents=TEXTS[2])
    first, second = (unit(last_hidden(server.model, TEXTS[index])) for index in (0, 2))
    assert status == 200
    assert json.loads(text)["data"][0]["score"] == pytest.approx(float(first @ second), abs=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"input": "x", "dimensions": 16}, "only supports Matryoshka dimensions [8, 32]"),
        ("/v1/embeddings", {"input": "x" * 300}, "256"),
        ("/pooling", {"input": "x", "task": "token_embed"}, "token_embed"),
        ("/pooling", {"input": "x", "task": "classify"}, "classify"),
    ],
    ids=["dimensions", "length", "token_embed", "classify"],
)
def test_what_cannot_be_answered_is_a_client_error(server, path, body, said):
    status, text = server.post(path, **body)
    assert status == 400 and said in text, text
    assert server.post("/v1/embeddings", input="still alive")[0] == 200


@pytest.mark.nightly
def test_nothing_is_generated_or_classified(server):
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/classify", {"input": "x"})):
        status, text = server.post(path, **body)
        assert status in (400, 404), text
