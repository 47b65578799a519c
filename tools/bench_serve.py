# SPDX-License-Identifier: Apache-2.0
"""A server under load: `vllm serve` of each side in turn, with vLLM's own client of 16 users at once.

For our side alone also what a prefix hit saves: time to first token of a prompt whose first 448 of 512 tokens
the server has seen, over that of one it has not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_run
import demo
from bench_report import Figures
from bench_sides import Side
from devtools.console import Failure, Step

CLIENTS = 16
INPUT_TOKENS = 256
INPUT_SPREAD = 0.5  # of the input tokens, either way: 256 ± 128
OUTPUT_TOKENS = 128
PREFIX_TOKENS, PROMPT_TOKENS = 448, 512
CLI = ["-m", "vllm.entrypoints.cli.main"]
# What `vllm serve` starts. The command itself asks for the version of a distribution called vllm, which the CPU
# backend's wheel is not.
SERVER = ["-m", "vllm.entrypoints.openai.api_server"]


def flags(engine_args: dict[str, Any]) -> list[str]:
    """Arguments of `LLM(...)` as `vllm serve` takes them."""
    words: list[str] = []
    for name, value in engine_args.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


def server_command(options: argparse.Namespace, model: Path, port: int) -> list[str]:
    """A server with what both sides are told."""
    command = [*SERVER, "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", options.dtype, "--max-model-len", str(options.max_model_len)]
    return [*command, "--max-num-seqs", str(CLIENTS), *flags(json.loads(options.engine_args))]


def client_command(address: str, model: Path, num_prompts: int, result: Path) -> list[str]:
    """`vllm bench serve` over random prompts, 16 at a time, each answered by 128 tokens."""
    spread = json.dumps({"input": INPUT_SPREAD, "output": 0.0})
    arguments = {
        "backend": "openai",
        "endpoint": "/v1/completions",
        "base-url": address,
        "model": model,
        "dataset-name": "random",
        "random-input-len": INPUT_TOKENS,
        "random-output-len": OUTPUT_TOKENS,
        "random-range-ratio": spread,
        "num-prompts": num_prompts,
        "max-concurrency": CLIENTS,
        "num-warmups": min(CLIENTS, num_prompts),
        "temperature": 0,
        "percentile-metrics": "ttft,tpot",
        "metric-percentiles": 99,
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    return [*CLI, "bench", "serve", *words, "--ignore-eos", "--save-result", "--disable-tqdm"]


def figures_of(result: dict[str, Any], num_prompts: int) -> Figures:
    """What the client found; raises `Failure` unless every request was answered by every token."""
    made, wanted = result["total_output_tokens"], num_prompts * OUTPUT_TOKENS
    if result["completed"] != num_prompts or made != wanted:
        raise Failure(
            f"{result['completed']} of {num_prompts} requests were answered, by {made} of {wanted} tokens"
        )
    return {
        "serve_requests_s": round(result["request_throughput"], 3),
        "serve_tpot_p99_ms": round(result["p99_tpot_ms"], 2),
        "serve_ttft_p99_ms": round(result["p99_ttft_ms"], 1),
    }


def hit_ratio(cold: list[float], warm: list[float], hits: int) -> float:
    """Time of a prompt with a prefix hit over one without; raises `Failure` unless `hits` tokens were found."""
    wanted = PREFIX_TOKENS * len(warm)
    if hits != wanted:
        raise Failure(f"no ratio: of the {wanted} tokens of shared prefixes the server found {hits}")
    return round(statistics.median(warm) / statistics.median(cold), 3)


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    address: str
    model: Path

    def seconds(self, token_ids: list[int]) -> float:
        """Until the first token of an answer has come: the whole of a request for one."""
        body = {"model": str(self.model), "prompt": token_ids, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self.address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begun = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as reply:
            reply.read()
        return time.perf_counter() - begun

    def hits(self) -> int:
        """Tokens of prompts found in the prefix cache since the start."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as page:
            return demo.metric(page.read().decode(), "vllm:prefix_cache_hits_total")

    def prefix_hit(self, repeats: int) -> float:
        """`hit_ratio` over prefixes that are new every time, after one pair that is not counted."""
        cold: list[float] = []
        warm: list[float] = []
        before = 0
        with Step("ours: prompts with a prefix hit and without"):
            for index in range(repeats + 1):
                if index == 1:
                    cold, warm, before = [], [], self.hits()
                first, other = (
                    bench_run.prompt(PROMPT_TOKENS, 10_000 + 2 * index + row)["prompt_token_ids"]
                    for row in (0, 1)
                )
                cold.append(self.seconds(first))
                warm.append(self.seconds(first[:PREFIX_TOKENS] + other[PREFIX_TOKENS:]))
        return hit_ratio(cold, warm, self.hits() - before)


@contextlib.contextmanager
def serving(side: Side, options: argparse.Namespace, model: Path, caches: Path) -> Iterator[Running]:
    """The side's server, stopped with its children at the end; raises `Failure` if it does not start."""
    port, log = demo.free_port(), caches / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [side.python, *server_command(options, model, port)],
            env=side.environ(caches),
            cwd=caches,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        demo.wait_until_ready(process, port, log)
        yield Running(f"http://127.0.0.1:{port}", model)
    finally:
        demo.stop(process)


class ServeBench:
    """Servers of one model under one set of options."""

    def __init__(self, options: argparse.Namespace, model: Path, client: Side) -> None:
        self.options = options
        self.model = model
        self.client = client
        """Whose `vllm bench serve` asks: the same for both sides."""

    def measure(self, side: Side, caches: Path, *, with_prefix_hit: bool) -> Figures:
        """Start a server, load it, and stop it."""
        count, result = self.options.serve_prompts, caches / "serve.json"
        with serving(side, self.options, self.model, caches) as server:
            command = client_command(server.address, self.model, count, result)
            self.client.run(f"asking {side.name}'s server {count} times", command, caches)
            found = figures_of(json.loads(result.read_text()), count)
            if with_prefix_hit:
                found["prefix_hit_ttft_ratio"] = server.prefix_hit(self.options.repeats)
        return found

    def alone(self, mine: Side, caches: Path) -> dict[str, Any]:
        """Our own figures."""
        runs = [self.measure(mine, caches, with_prefix_hit=True) for _ in range(self.options.rounds)]
        return {"runs": {"ours": runs}}

    def against_peer(self, sides: dict[str, tuple[Side, Path]]) -> dict[str, Any]:
        """Both sides in turn; returns every run, and the ratios of the figures both have."""
        runs: dict[str, list[Figures]] = {name: [] for name in sides}
        for _ in range(self.options.rounds):
            for name, (side, caches) in sides.items():
                runs[name].append(self.measure(side, caches, with_prefix_hit=name == "ours"))
        pairs = list(zip(runs["ours"], runs["peer"], strict=True))
        ratios = {key: [a[key] / b[key] for a, b in pairs] for key in runs["peer"][0]}
        return {"runs": runs, "ratios": ratios}
