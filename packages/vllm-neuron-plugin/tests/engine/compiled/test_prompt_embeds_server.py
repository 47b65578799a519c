# SPDX-License-Identifier: Apache-2.0
"""Prompt embeddings over HTTP, with graphs compiled ahead: answers, and a 400 that names what else is wrong."""

from __future__ import annotations

import base64
import io
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

pytestmark = pytest.mark.nightly

CLI = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
BUCKETS = '{"neuron_config": {"prefill_buckets": [64], "decode_buckets": [8]}}'
# fmt: off
LIMITS = [
    "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "64",
    "--num-gpu-blocks-override", "80", "--additional-config", BUCKETS, "--enable-prompt-embeds",
]
# fmt: on


@pytest.fixture(scope="module")
def store(tiny_llama: Path, graph_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graphs of such a server, compiled ahead of time."""
    folder = tmp_path_factory.mktemp("ahead")
    for name in ("kernels", "toolchain"):  # of this machine, and no part of what is tested
        if (graph_cache / name).exists():
            shutil.copytree(graph_cache / name, folder / name)
    command = [sys.executable, "-m", "neuron_core.cli", "compile", tiny_llama, "--target", "cpu"]
    subprocess.run([*command, "--output", folder, *LIMITS], check=True, timeout=280)
    return folder


@pytest.fixture(scope="module")
def client(tiny_llama: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    log = tmp_path_factory.mktemp("server") / "serve.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {name: v for name, v in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*CLI, "serve", str(tiny_llama), "--port", str(port), *LIMITS],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables | {"VLLM_NEURON_CACHE_DIR": str(store), "VLLM_NEURON_REQUIRE_COMPILED": "1"},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.25)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def rows(tiny_llama: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]


def encoded(value: Any) -> str:
    saved = io.BytesIO()
    torch.save(value, saved)
    return base64.b64encode(saved.getvalue()).decode()


def complete(client: Any, model: Path, prompt: Any = None, embeds: Any = None, **more: Any) -> list[str]:
    body = {} if embeds is None else {"prompt_embeds": embeds}
    settings = {"max_tokens": 12, "temperature": 0, "extra_body": body | {"ignore_eos": True}}
    answer = client.completions.create(model=str(model), prompt=prompt, **settings, **more)
    return [choice.text for choice in answer.choices]


def test_embeddings_of_tokens_give_the_text_of_the_tokens(client, tiny_llama, rows):
    ids = [[39, 38, 37], [30 + 7 * i % 60 for i in range(90)], [77]]
    payloads = [encoded(rows[torch.tensor(prompt)]) for prompt in ids]
    expected = complete(client, tiny_llama, ids)
    assert complete(client, tiny_llama, None, payloads) == expected
    assert complete(client, tiny_llama, ids[0], payloads[1]) == [expected[1], expected[0]]
    double = encoded(rows[torch.tensor(ids[0])].double())  # another type of float
    assert complete(client, tiny_llama, None, double) == expected[:1]


def test_embeddings_within_a_chat(client, tiny_llama, rows):
    def ask(parts: list[dict[str, Any]]) -> str:
        answer = client.chat.completions.create(
            model=str(tiny_llama), messages=[{"role": "user", "content": parts}], max_tokens=12, temperature=0
        )
        return answer.choices[0].message.content

    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(tiny_llama).encode("middle")
    given = {"type": "prompt_embeds", "data": encoded(rows[torch.tensor(ids)])}
    text = [{"type": "text", "text": part} for part in ("before", "middle", "after")]
    assert ask([text[0], given, text[2]]) == ask(text)


REFUSED = {
    "width": (torch.zeros(3, 65), "hidden_size 65"),
    "dimensions": (torch.zeros(2, 3, 64), "2D"),
    "integers": (torch.zeros(3, 64, dtype=torch.int32), "int32"),
    "nan": (torch.full((3, 64), float("nan")), "not finite"),
    "overflow": (torch.full((3, 64), 1e300, dtype=torch.float64), "not finite"),
    "empty": (torch.zeros(0, 64), "empty"),
    "long": (torch.zeros(129, 64), "128"),
    "stretched": (torch.zeros(1, 64).expand(1 << 22, 64), "byte limit"),
    "no tensor": ({"a": 1}, "torch.Tensor"),
    "no memory": (torch.zeros(3, 64, device="meta"), "meta device"),
    "nested": (torch.nested.nested_tensor([torch.zeros(3, 64)], layout=torch.jagged), "nested"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_a_400_and_the_server_lives(client, tiny_llama, rows, case):
    value, said = REFUSED[case]
    before = complete(client, tiny_llama, [5, 6])
    with pytest.raises(openai.BadRequestError, match=said):
        complete(client, tiny_llama, None, encoded(value))
    with pytest.raises(openai.BadRequestError, match=said):
        complete(client, tiny_llama, None, encoded(value), stream=True)
    with pytest.raises(openai.BadRequestError, match=said):  # beside one that is not
        complete(client, tiny_llama, None, [encoded(rows[torch.tensor([5, 6])]), encoded(value)])
    assert complete(client, tiny_llama, None, encoded(rows[torch.tensor([5, 6])])) == before


@pytest.mark.parametrize("payload", ["no base64!", "", base64.b64encode(b"nothing").decode()], ids=repr)
def test_what_is_no_payload_is_a_400(client, tiny_llama, payload):
    with pytest.raises(openai.BadRequestError):
        complete(client, tiny_llama, None, payload)


def test_a_planted_pickle_is_a_400_and_runs_nothing(client, tiny_llama, tmp_path):
    mark = tmp_path / "was here"

    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(mark),))

    with pytest.raises(openai.BadRequestError, match="could not be deserialized"):
        complete(client, tiny_llama, None, base64.b64encode(pickle.dumps(Planted())).decode())
    assert not mark.exists()


def test_a_parameter_that_needs_gradients_is_a_tensor_like_any_other(client, tiny_llama, rows):
    expected = complete(client, tiny_llama, [5, 6])
    given = torch.nn.Parameter(rows[torch.tensor([5, 6])])
    assert complete(client, tiny_llama, None, encoded(given)) == expected


def test_probabilities_of_the_prompt_are_refused(client, tiny_llama, rows):
    embeds = encoded(rows[torch.tensor([5, 6])])
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        client.completions.create(
            model=str(tiny_llama), prompt=None, extra_body={"prompt_embeds": embeds, "prompt_logprobs": 1}
        )
