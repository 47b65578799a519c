# SPDX-License-Identifier: Apache-2.0
"""Engines with compiled graphs in this process, driven step by step, and what must hold after every test."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

Prompt = Sequence[int]

TINY: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 33,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 640,
    "additional_config": {"neuron_config": {"prefill_buckets": [64, 256], "decode_buckets": [4, 33]}},
}
"""Room for 33 requests of the whole length. A second engine with these shapes loads every graph from the cache."""

SMOLLM2: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 600,
    "additional_config": {"neuron_config": {"prefill_buckets": [128, 512], "decode_buckets": [1, 6, 16]}},
}

GOLDEN_TOKENS = 64
# fmt: off
GOLDEN_LENGTHS = (
    1, 1, 2, 3, 5, 7, 8, 12, 15, 16, 17, 23, 31, 32, 33, 40,
    47, 48, 63, 64, 65, 90, 100, 127, 128, 129, 160, 200, 255, 256, 300, 400,
)
# fmt: on


class Engine:
    """One vLLM engine whose core runs in this process, so that a test sees each step and every block."""

    def __init__(self, model: Path, **settings: Any) -> None:
        from vllm import LLM

        self.llm = LLM(str(model), **settings)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.preemptions = 0
        self._count = 0
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counting

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        """The model runner; only of an engine of one rank, whose worker lives in this process."""
        return self.core.model_executor.driver_worker.worker.runner

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def graph_counts(self) -> list[dict[str, int]]:
        """Per rank: graphs captured, compiled and loaded since the start."""
        return self.core.model_executor.collective_rpc(_graph_counts)

    def add(self, prompt: Prompt | dict[str, Any], params: Any) -> str:
        """Queue a request, to be put out once and whole, and return its id; its prompt is token ids or vLLM's own."""
        from vllm.sampling_params import RequestOutputKind

        request_id = f"r{self._count}"
        self._count += 1
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        asked = prompt if isinstance(prompt, dict) else {"prompt_token_ids": list(prompt)}
        self.engine.add_request(request_id, asked, params)
        return request_id

    def step(self) -> dict[str, Any]:
        """One step; the outputs it produced by request id."""
        return {output.request_id: output for output in self.engine.step()}

    def run(self, prompts: Sequence[Prompt], params: Any, *, arrive: int = 0) -> list[Any]:
        """The finished outputs of all prompts in order.

        ``params`` is one for all or a list. With ``arrive`` a prompt is added every that many steps, else all at once.
        """
        each = params if isinstance(params, list) else [params] * len(prompts)
        waiting = list(zip(prompts, each, strict=True))
        ids: list[str] = []
        finished: dict[str, Any] = {}
        steps = 0
        while waiting or self.engine.has_unfinished_requests():
            while waiting and (arrive == 0 or steps >= arrive * len(ids)):
                ids.append(self.add(*waiting.pop(0)))
            finished |= {name: output for name, output in self.step().items() if output.finished}
            steps += 1
            assert steps < 20_000, "the engine makes no progress"
        return [finished[name] for name in ids]

    def tokens(self, prompts: Sequence[Prompt], params: Any, *, arrive: int = 0) -> list[list[int]]:
        """Token ids of the only output of each prompt."""
        return [list(output.outputs[0].token_ids) for output in self.run(prompts, params, arrive=arrive)]

    def check_idle(self) -> None:
        """No request anywhere, every block free, and the worker's rows given back."""
        assert not self.engine.has_unfinished_requests()
        for _ in range(3):  # finished ids reach the worker with a later, empty step
            self.core.step_fn()
        assert self.scheduler.get_request_counts() == (0, 0)
        assert not self.scheduler.requests
        assert self.engine.reset_prefix_cache()
        assert self.free_blocks == self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        assert not any(self.core.model_executor.collective_rpc(_held_requests))


def _graph_counts(worker: Any) -> dict[str, int]:
    counts = asdict(worker.runner.executor.builder.stats)
    return {name: counts[name] for name in ("captured", "compiled", "loaded")}


def _held_requests(worker: Any) -> list[str]:
    return list(worker.runner.table.requests)


@pytest.fixture(scope="session")
def engine_environment(graph_cache: Path) -> Iterator[pytest.MonkeyPatch]:
    """The engine core runs in this process; ranks are spawned, because OpenMP does not survive a fork."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("VLLM_NEURON_CACHE_DIR", str(graph_cache))
        yield patch


EngineFactory = Callable[..., Engine]


@pytest.fixture(scope="module")
def engines(engine_environment: pytest.MonkeyPatch) -> Iterator[EngineFactory]:
    """``engines(model, **settings)``: an engine per configuration, shared by a module's tests and then shut down."""
    made: dict[str, Engine] = {}

    def make(model: Path, **settings: Any) -> Engine:
        key = repr((str(model), sorted(settings.items())))
        if key not in made:
            made[key] = Engine(model, **settings)
        return made[key]

    make.made = made  # type: ignore[attr-defined]
    yield make
    for engine in made.values():
        engine.engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def integrity(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test, every engine of its module is idle and whole."""
    yield
    if "engines" in request.fixturenames:
        for engine in request.getfixturevalue("engines").made.values():
            engine.check_idle()


@pytest.fixture(scope="module")
def tiny(engines: EngineFactory, tiny_llama: Path) -> Engine:
    """The tiny Llama with room for everything."""
    return engines(tiny_llama, **TINY)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def tiny_both(request: pytest.FixtureRequest, engines: EngineFactory, tiny_llama: Path) -> Engine:
    """The tiny Llama, without and with asynchronous scheduling."""
    return engines(tiny_llama, **TINY, **({"async_scheduling": True} if request.param else {}))


@pytest.fixture(scope="module")
def tiny_settings() -> dict[str, Any]:
    return dict(TINY)


@pytest.fixture(scope="module")
def smollm2_settings() -> dict[str, Any]:
    return dict(SMOLLM2)


def _generate(folder: Path, prompts: Sequence[Prompt], num_tokens: int) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, list[int]] = {}
    for start in range(0, len(order), 16):  # neighbours in length, so that little is padding
        group = order[start : start + 16]
        width = max(len(prompts[index]) for index in group)
        ids = torch.zeros(len(group), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(group):
            ids[row, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[row, width - len(prompts[index]) :] = 1
        settings = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=mask, **settings)
        found |= {index: out[row, width:].tolist() for row, index in enumerate(group)}
    return [found[index] for index in range(len(prompts))]


@pytest.fixture(scope="session")
def continuations(graph_cache: Path) -> Callable[[Path, Sequence[Prompt], int], list[list[int]]]:
    """``continuations(folder, prompts, num_tokens)``: what transformers' ``generate`` adds to each, greedily, in fp32.

    Answers are kept beside the compile cache under a hash of the question: weights, prompts and versions.
    """
    import torch
    import transformers

    def ask(folder: Path, prompts: Sequence[Prompt], num_tokens: int) -> list[list[int]]:
        versions = [torch.__version__, transformers.__version__]
        question = hashlib.sha256(json.dumps([versions, [list(p) for p in prompts], num_tokens]).encode())
        for file in (*sorted(folder.glob("*.safetensors")), folder / "config.json"):
            question.update(file.read_bytes())
        kept = graph_cache.parent / "continuations" / f"{question.hexdigest()}.json"
        if not kept.exists():
            answer = _generate(folder, prompts, num_tokens)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(answer))
        return json.loads(kept.read_text())

    return ask


@pytest.fixture(scope="session")
def golden_prompts(smollm2: Path) -> list[list[int]]:
    """32 prompts of 1 to 400 tokens cut from one text."""
    from transformers import AutoTokenizer

    text = (Path(__file__).parent / "golden_text.txt").read_text()
    ids = AutoTokenizer.from_pretrained(smollm2).encode(text)
    starts = [(37 * index) % (len(ids) - length) for index, length in enumerate(GOLDEN_LENGTHS)]
    return [ids[start : start + length] for start, length in zip(starts, GOLDEN_LENGTHS, strict=True)]


@pytest.fixture(scope="session")
def golden(smollm2: Path, golden_prompts: list[list[int]], continuations: Any) -> list[list[int]]:
    """The 64 tokens that transformers adds to each golden prompt, in fp32."""
    return continuations(smollm2, golden_prompts, GOLDEN_TOKENS)


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., list[list[int]]]:
    """``make_prompts(count, longest, seed=0)``: prompts of 1 to ``longest`` random tokens, none a special one."""
    import numpy as np

    def make(count: int, longest: int, seed: int = 0) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        return [rng.integers(3, 256, rng.integers(1, longest + 1)).tolist() for _ in range(count)]

    return make


SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
# fmt: off
SERVER_LIMITS = [
    "--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "256",
    "--additional-config", '{"neuron_config": {"prefill_buckets": [256], "decode_buckets": [8]}}',
    "--num-gpu-blocks-override", "200", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
]
# fmt: on


@dataclass
class Server:
    """A ``vllm serve`` in a process group of its own; ``name`` is its model's."""

    process: subprocess.Popen[bytes]
    url: str
    name: str
    log: Path

    @classmethod
    def start(cls, model: Path, cache: Path, log: Path, limits: Sequence[str]) -> Server:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*SERVE, str(model), "--port", str(port), *limits],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=cls.environment | {"VLLM_NEURON_CACHE_DIR": str(cache)},
                start_new_session=True,
            )
        return cls(process, f"http://127.0.0.1:{port}", str(model), log)

    environment = {
        name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
    } | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    """What vLLM's commands run with: the settings of a server, not those of the engines in this process."""

    @property
    def client(self) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 400
        while True:
            alive = self.process.poll() is None
            assert alive and time.monotonic() < deadline, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.25)

    def stop(self) -> None:
        """End it; nothing it said until then may be a traceback."""
        # Read before: vLLM's front end now and then reports the engine that it ends as dead.
        tracebacks = self.tracebacks()
        try:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        finally:
            self.kill()
        assert not tracebacks

    def tracebacks(self) -> list[str]:
        """What its log says at the end of each, without refusals, which some of vLLM's handlers log before the 400."""
        end = r"^(?:\((\w+) pid=\d+\) .*?\] )?([\w.]+(?:Error|Exception|Interrupt|Exit|Group)\b.*)$"
        said = [re.search(end, one, re.M) for one in self.log.read_text().split("Traceback (most recent")[1:]]
        ends = [(match and match.groups()) or ("?", "a traceback without an end") for match in said]
        refusal = re.compile(r"(\w+\.)*(ValueError|\w*ValidationError):")
        return [text for process, text in ends if process != "APIServer" or not refusal.match(text)]

    def kill(self) -> None:
        """End every process of it at once, if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def metric(self, name: str, absent: float | None = None) -> float:
        """Sum of a metric over its labels; ``absent`` if it is not there, where that is allowed."""
        page = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        assert values or absent is not None, f"{name} is not among the metrics"
        return sum(map(float, values)) if values else absent

    def graphs(self) -> float:
        """Graphs that it compiled or loaded since its start."""
        return sum(self.metric(f"vllm_neuron:graphs_{how}_total", 0.0) for how in ("compiled", "loaded"))


@pytest.fixture(scope="session")
def start_server(smollm2: Path) -> Iterator[Callable[..., Server]]:
    """``start_server(cache, log, model=SmolLM2, limits=SERVER_LIMITS)``: a server, not ready yet, killed in the end."""
    started: list[Server] = []

    def start(cache: Path, log: Path, model: Path = smollm2, limits: Sequence[str] = SERVER_LIMITS) -> Server:
        started.append(Server.start(model, cache, log, limits))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def server(
    start_server: Callable[..., Server], graph_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server for the modules that ask one."""
    server = start_server(graph_cache, tmp_path_factory.mktemp("server") / "serve.log")
    server.wait_until_ready()
    yield server
    server.stop()
