# SPDX-License-Identifier: Apache-2.0
"""Profiles of real engines: what is in the file, that its times add up, and what is refused."""

from __future__ import annotations

import gzip
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from vllm import SamplingParams
from vllm.exceptions import ProfilerAlreadyActiveError

from neuron_core.cli.main import neuron
from neuron_core.errors import ConfigError
from neuron_core.profiling.timeline import recording
from vllm_neuron.profiling import ProfileError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ON_HOST = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, presence_penalty=0.5)
SCORED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def load(folder: Path, pattern: str = "*.trace.json.gz") -> dict[str, Any]:
    """The only trace in a folder, read strictly."""
    (path,) = folder.glob(pattern)
    return json.loads(gzip.decompress(path.read_bytes()), parse_constant=refuse)


def summary(folder: Path) -> list[dict[str, Any]]:
    """What the command says of the only trace in a folder, a table per rank."""
    (path,) = folder.glob("*.trace.json.gz")
    done = CliRunner().invoke(neuron, ["profile", "summarize", str(path), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)["ranks"]


class Watch:
    """What a profile's interval lies between: from after the start to before the stop, and the other way round."""

    def __init__(self) -> None:
        self.asked_to_start = time.perf_counter()
        self.started = self.asked_to_stop = self.stopped = 0.0

    def check(self, rank: dict[str, Any], idle: float) -> None:
        """Rows add up to wall time within 2 %; of it about ``idle`` seconds are nobody's."""
        wall = rank["wall_s"]
        assert self.asked_to_stop - self.started <= wall <= self.stopped - self.asked_to_start
        total = sum(row["total_s"] for row in rank["buckets"]) + rank["idle_or_other_s"]
        assert total == pytest.approx(wall, rel=0.02)
        assert idle <= rank["idle_or_other_s"] <= idle + 0.1 * wall + self.slack

    @property
    def slack(self) -> float:
        """Seconds that starting and stopping took, which may or may not be in the interval."""
        return self.stopped - self.asked_to_stop + self.started - self.asked_to_start


@contextmanager
def profiled(start: Callable[[], Any], stop: Callable[[], Any]) -> Iterator[Watch]:
    """Profile what is inside, looking at the clock."""
    watch = Watch()
    start()
    watch.started = time.perf_counter()
    yield watch
    watch.asked_to_stop = time.perf_counter()
    stop()
    watch.stopped = time.perf_counter()


def check_nesting(document: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """On every row, two slices are apart or one lies in the other; the slices of our own rows."""
    rows = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    for events in rows.values():
        open_until: list[float] = []
        for event in events:  # as written: by start, the longer first
            ended = round((event["ts"] + event["dur"]) * 1000)
            while open_until and open_until[-1] <= round(event["ts"] * 1000):
                open_until.pop()
            assert not open_until or ended <= open_until[-1], event
            open_until.append(ended)
    return {row: events for row, events in rows.items() if row[0] < 1000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module", params=[pytest.param(False, marks=NIGHTLY), True], ids=["sync", "async"])
def engine(request: Any, engines: Any, tiny_llama: Path, tiny_settings: dict[str, Any], folder: Path) -> Any:
    """The tiny Llama, able to profile into ``folder``."""
    config = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False}
    settings = tiny_settings | {"async_scheduling": request.param, "profiler_config": config}
    made = engines(tiny_llama, **settings)
    made.run([[5, 6, 7]] * 3, [GREEDY, ON_HOST, SCORED])  # so that nothing happens for the first time later
    return made


@pytest.fixture
def empty(folder: Path) -> Path:
    """The folder, without what earlier tests wrote."""
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


@pytest.mark.supports("profiling", model="llama")
def test_a_profile_has_every_step_and_its_times_add_up(engine, empty, make_prompts, monkeypatch):
    executor, ran = engine.runner.executor, Counter()
    run = executor.run

    def counting(bucket: Any, variant: str, values: Any) -> Any:
        ran[bucket.name] += 1
        return run(bucket, variant, values)

    monkeypatch.setattr(executor, "run", counting)
    prompts = make_prompts(6, 40, seed=4)
    with profiled(lambda: engine.llm.start_profile("mine"), engine.llm.stop_profile) as watch:
        for _ in range(3):
            engine.run(prompts, [GREEDY] * 4 + [ON_HOST, SCORED])
            time.sleep(0.2)
    assert recording() is None

    (name,) = [path.name for path in empty.iterdir()]
    assert name.startswith("mine_rank0_")
    assert name.endswith(".trace.json.gz")
    document = load(empty)
    rows = check_nesting(document)
    assert len(rows) == (2 if engine.runner.overlap else 1)
    slices = [event for events in rows.values() for event in events]
    assert Counter(e["name"] for e in slices if e["cat"] == "graph") == ran
    kinds = {"schedule", "build", "submit", "step", "graph", "sampling", "wait", "output"}
    assert {e["cat"] for e in slices} == kinds
    (rank,) = summary(empty)
    watch.check(rank, idle=0.6)
    assert {row["bucket"]: row["count"] for row in rank["buckets"]} == ran
    names = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    ops = {names[e["tid"]] for e in document["traceEvents"] if e.get("cat") == "cpu_op"}
    assert ops >= ({"engine thread", "stream"} if engine.runner.overlap else {"engine thread"})


def test_each_step_flows_from_its_submission(engine, empty, make_prompts):
    engine.llm.start_profile()
    engine.run(make_prompts(3, 20, seed=5), GREEDY)
    engine.llm.stop_profile()
    events = load(empty)["traceEvents"]
    slices = {kind: [e for e in events if e.get("cat") == kind] for kind in ("submit", "step")}
    flows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    assert len(flows) == len(slices["step"]) == len(slices["submit"]) > 10
    for flow in flows.values():
        for end, kind in (("s", "submit"), ("f", "step")):
            (around,) = [
                e
                for e in slices[kind]
                if e["tid"] == flow[end]["tid"] and e["ts"] <= flow[end]["ts"] < e["ts"] + e["dur"]
            ]
            assert around
        assert flow["s"]["ts"] <= flow["f"]["ts"]
        assert (flow["s"]["tid"] == flow["f"]["tid"]) == (not engine.runner.overlap)


def test_delay_and_limit_are_counted_in_steps(engine, empty):
    engine.llm.start_profile("limited", delay_iterations=3, max_iterations=5)
    engine.run([[9, 8, 7]], GREEDY)
    assert recording() is None, "the limit did not end it"
    engine.llm.stop_profile()
    steps = [e for e in load(empty)["traceEvents"] if e.get("cat") == "step"]
    # The first of its 12 steps is the prompt's; the third is the first recorded.
    assert [e["args"]["bucket"].split("_")[0] for e in steps] == ["decode"] * 5


def test_a_stop_before_the_delay_is_over_writes_nothing(engine, empty):
    engine.llm.start_profile(delay_iterations=1000)
    engine.run([[9, 8, 7]], GREEDY)
    engine.llm.stop_profile()
    assert not list(empty.iterdir())


def test_starting_twice_and_stopping_without_a_start_are_refused(engine, empty):
    with pytest.raises(ProfileError, match="no profile is open; call start_profile first"):
        engine.llm.stop_profile()
    engine.llm.start_profile()
    with pytest.raises(ProfilerAlreadyActiveError):
        engine.llm.start_profile()
    with pytest.raises(ProfileError, match="a profile is open; call stop_profile before"):
        engine.core.profile(True)
    engine.llm.stop_profile()
    with pytest.raises(ValueError, match="profile_prefix must be"):
        engine.llm.start_profile("../elsewhere")
    assert len(list(empty.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(engine, empty):
    empty.rmdir()
    empty.write_text("in the way")
    try:
        with pytest.raises(ConfigError, match=r"torch_profiler_dir=.*cannot be written"):
            engine.llm.start_profile()
    finally:
        empty.unlink()
        empty.mkdir()
    assert recording() is None
    assert len(engine.tokens([[9, 8, 7]], GREEDY)[0]) == 12


def test_a_profile_that_cannot_be_written_is_kept_until_it_can(engine, empty):
    engine.llm.start_profile()
    engine.run([[9, 8, 7]], GREEDY)
    empty.rmdir()
    empty.write_text("in the way")
    try:
        with pytest.raises(ProfileError, match=r"torch_profiler_dir=.*kept: make room and call stop_profile"):
            engine.llm.stop_profile()
    finally:
        empty.unlink()
    engine.llm.stop_profile()
    assert len([e for e in load(empty)["traceEvents"] if e.get("cat") == "step"]) == 12


def test_one_that_its_limit_ended_in_vain_is_written_by_the_stop(engine, empty):
    engine.llm.start_profile(max_iterations=4)
    empty.rmdir()
    empty.write_text("in the way")
    engine.run([[9, 8, 7]], GREEDY)
    assert recording() is None
    empty.unlink()
    engine.llm.stop_profile()
    assert len([e for e in load(empty)["traceEvents"] if e.get("cat") == "step"]) == 4


def test_a_profile_that_is_open_at_the_end_is_written(engine, empty):
    engine.llm.start_profile()
    engine.run([[9, 8, 7]], GREEDY)
    engine.core.model_executor.driver_worker.worker.profiler.shutdown()  # as the worker's own shutdown does
    assert len([e for e in load(empty)["traceEvents"] if e.get("cat") == "step"]) == 12
    engine.llm.stop_profile()


def test_without_a_configuration_the_setting_is_named(engine, monkeypatch):
    monkeypatch.setattr(engine.core.model_executor.driver_worker.worker, "profiler", None)
    with pytest.raises(ConfigError, match=r"--profiler-config\.profiler=None: profiling is off; start with"):
        engine.llm.start_profile()


@pytest.mark.nightly
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_two_ranks_share_a_file_and_an_error_is_told_once(
    engines, tiny_llama, tmp_path, make_prompts, asynchronous
):
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_with_stack": False}
    two = {"max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 40, "dtype": "float32"}
    buckets = {"neuron_config": {"prefill_buckets": [128], "decode_buckets": [4]}}
    engine = engines(
        tiny_llama,
        **two,
        tensor_parallel_size=2,
        additional_config=buckets,
        async_scheduling=asynchronous,
        profiler_config=config,
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no profile is open"):
            engine.llm.stop_profile()
    engine.run(make_prompts(4, 40, seed=6), GREEDY)
    with profiled(engine.llm.start_profile, engine.llm.stop_profile) as watch:
        engine.run(make_prompts(4, 40, seed=6), GREEDY)
    rows = check_nesting(load(tmp_path, "rank0-1_*.trace.json.gz"))
    steps = Counter(pid for (pid, _), events in rows.items() for e in events if e["cat"] == "step")
    assert len(steps) == 2
    assert len(set(steps.values())) == 1
    scheduled = [e for events in rows.values() for e in events if e["name"] == "schedule"]
    assert len(scheduled) >= max(steps.values())
    assert not {e["pid"] for e in scheduled} & steps.keys(), "the scheduler has a process of its own"
    for rank in summary(tmp_path):
        watch.check(rank, idle=0)


@pytest.fixture(scope="module")
def processor() -> Any:
    """Perfetto's Python package; it has to find its program on PATH, because it would download it."""
    module = pytest.importorskip("perfetto.trace_processor", reason="needs the PyPI package perfetto")
    if shutil.which("trace_processor_shell") is None:
        pytest.skip("needs perfetto's trace_processor_shell on PATH, which its package would download")
    return module


@pytest.mark.nightly
def test_perfettos_own_trace_processor_finds_what_we_wrote(processor, engine, empty, make_prompts):
    engine.llm.start_profile()
    engine.run(make_prompts(3, 20, seed=5), GREEDY)
    engine.llm.stop_profile()
    (path,) = empty.iterdir()
    settings = processor.TraceProcessorConfig(bin_path=shutil.which("trace_processor_shell"))
    with processor.TraceProcessor(trace=str(path), config=settings) as opened:
        found = Counter(row.name for row in opened.query("select name from slice where category = 'graph'"))
        errors = list(opened.query("select name, value from stats where severity = 'error' and value > 0"))
    assert found == Counter(e["name"] for e in load(empty)["traceEvents"] if e.get("cat") == "graph")
    assert not errors


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path, graph_cache: Path, tiny_settings: dict[str, Any], tmp_path_factory: Any
) -> Iterator[tuple[str, Path]]:
    """A server that may profile: its address, and the folder."""
    place = tmp_path_factory.mktemp("server")
    folder, log = place / "traces", place / "serve.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {"profiler": "torch", "torch_profiler_dir": str(folder), "ignore_frontend": True}
    # fmt: off
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(tiny_llama), "--port", str(port),
        "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "33",
        "--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "640",
        "--additional-config", json.dumps(tiny_settings["additional_config"]),
        "--profiler-config", json.dumps(config | {"torch_profiler_with_stack": False}),
    ]
    # fmt: on
    ours = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment = ours | {"VLLM_NEURON_CACHE_DIR": str(graph_cache)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 300
        while ask(f"http://127.0.0.1:{port}/health")[0] != 200:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.25)
        yield f"http://127.0.0.1:{port}", folder
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of an answer; 0 while nobody listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


@pytest.mark.nightly
def test_a_server_is_profiled_over_http(server, tiny_llama):
    url, folder = server
    prompt = {"model": str(tiny_llama), "prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
    status, text = ask(f"{url}/stop_profile", {})
    assert status == 500
    assert "no profile is open; call start_profile first" in text
    assert ask(f"{url}/v1/completions", prompt)[0] == 200
    assert ask(f"{url}/start_profile", {"profile_prefix": "bad name"})[0] == 400
    answers = []
    start, stop = (
        lambda what=what: answers.append(ask(f"{url}/{what}_profile", {})) for what in ("start", "stop")
    )
    with profiled(start, stop) as watch:
        start()
        while time.perf_counter() < watch.started + 2:
            assert ask(f"{url}/v1/completions", prompt)[0] == 200
    assert [status for status, _ in answers] == [200, 409, 200]
    check_nesting(load(folder))
    (rank,) = summary(folder)
    assert rank["wall_s"] == pytest.approx(watch.asked_to_stop - watch.started, rel=0.02)
    watch.check(rank, idle=0)

    shutil.rmtree(folder)
    folder.write_text("in the way")
    status, text = ask(f"{url}/start_profile", {})
    assert status == 500
    assert "cannot be written" in text
    folder.unlink()
    assert ask(f"{url}/start_profile", {})[0] == 200
    assert ask(f"{url}/stop_profile", {})[0] == 200
    assert ask(f"{url}/v1/completions", prompt)[0] == 200
