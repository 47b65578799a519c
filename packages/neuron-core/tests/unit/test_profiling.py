# SPDX-License-Identifier: Apache-2.0
"""Timelines, the trace they become, its summary and the vendor's tool, without an engine."""

import gzip
import json
import math
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from neuron_core.cli.main import neuron
from neuron_core.errors import ConfigError, DeviceError
from neuron_core.profiling import timeline as timeline_module
from neuron_core.profiling.chrome import merge, rank_trace, read_trace, write_trace
from neuron_core.profiling.explorer import Explorer, inspection_variables
from neuron_core.profiling.summary import COLUMNS, summarize
from neuron_core.profiling.timeline import Kind, Thread, Timeline, record, recording, timed

ENGINE = Thread.current()
STREAM = Thread(ENGINE.pid, ENGINE.tid + 1, "neuron-stream")
SCHEDULER = Thread(ENGINE.pid + 1, ENGINE.tid + 2, "MainThread")
THREADS = (ENGINE, STREAM, SCHEDULER)


@timed(lambda name, **_: f"work {name}", Kind.BUILD, lambda name, **about: {"name": name, **about})
def work(name, **about):
    if name == "bad":
        raise ValueError(name)
    return name, about


@pytest.fixture
def recorded():
    """A timeline that this test records."""
    timeline = Timeline()
    record(timeline)
    yield timeline
    record(None)


def test_nothing_is_kept_unless_recorded():
    assert recording() is None
    assert work("a", size=1) == ("a", {"size": 1})
    assert recording() is None


def test_a_call_is_a_slice_even_if_it_raises(recorded):
    assert work("a", size=1) == ("a", {"size": 1})
    with pytest.raises(ValueError, match="bad"):
        work("bad")
    thread = threading.Thread(target=work, args=("b",), name="other")
    thread.start()
    thread.join()
    assert [(s.name, s.args, s.thread.name) for s in recorded.slices] == [
        ("work a", {"name": "a", "size": 1}, ENGINE.name),
        ("work bad", {"name": "bad"}, ENGINE.name),
        ("work b", {"name": "b"}, "other"),
    ]
    assert recorded.slices[2].thread.tid == thread.native_id
    assert all(recorded.begun <= s.begun <= s.ended for s in recorded.slices)


def test_what_exceeds_the_limit_is_counted(recorded, monkeypatch):
    monkeypatch.setattr(timeline_module, "MAX_SLICES", 2)
    for name in "abcde":
        work(name)
    assert (len(recorded.slices), recorded.dropped) == (2, 3)


def document_of(slices, ended, torch_trace=None):
    """The trace of rank 0 from ``(name, kind, begun, ended, args, thread)``, times in µs."""
    timeline = Timeline(begun=0, unix_offset=5_000)
    for name, kind, begun, end, args, thread in slices:
        timeline.add(name, kind, begun * 1000, end * 1000, args, thread)
    timeline.ended = ended * 1000
    return merge([rank_trace(timeline, 0, torch_trace)], {})


def step_args(number, bucket="decode_b4"):
    return {"step": number, "bucket": bucket}


TWO_STEPS = [
    ("schedule", Kind.SCHEDULE, 10, 12, {"after_idle": True}, ENGINE),
    ("build inputs", Kind.BUILD, 12, 15, {}, ENGINE),
    ("submit", Kind.SUBMIT, 15, 16, {"step": 0}, ENGINE),
    ("step", Kind.STEP, 17, 40, step_args(0, "prefill_s64"), STREAM),
    ("prefill_s64", Kind.GRAPH, 18, 35, {}, STREAM),
    ("host rows", Kind.SAMPLING, 35, 39, {}, STREAM),
    ("wait for the stream", Kind.WAIT, 16, 41, {}, ENGINE),
    ("output", Kind.OUTPUT, 41, 44, {}, ENGINE),
    ("schedule", Kind.SCHEDULE, 50, 52, {"after_idle": False}, ENGINE),
    ("submit", Kind.SUBMIT, 53, 54, {"step": 1}, ENGINE),
    ("step", Kind.STEP, 54, 60, step_args(1), STREAM),
    ("decode_b4", Kind.GRAPH, 54, 60, {}, STREAM),
]


def test_the_summary_of_two_steps_by_hand():
    (rank,) = summarize(document_of(TWO_STEPS, ended=100))
    rows = {row.bucket: (row.executions, row.spent) for row in rank.rows}
    nothing = dict.fromkeys(COLUMNS, 0.0)
    # 16 to 17 the engine waits; 17 to 18 and 39 to 40 the step prepares; 0 to 10 nobody was there.
    assert rows["prefill_s64"] == (
        [17.0],
        nothing | {"sampling": 4.0, "build": 3.0 + 2.0, "schedule": 2.0, "wait": 1.0, "gap": 1.0},
    )
    assert rows["decode_b4"] == (
        [6.0],
        nothing | {"output": 3.0, "schedule": 2.0, "wait": 1.0, "gap": 6.0 + 1.0 + 1.0},
    )
    assert rank.wall == 100.0
    assert rank.idle == 10.0 + 40.0


def test_an_engine_without_requests_is_idle_and_not_slow():
    slices = [s if s[0] != "schedule" else (*s[:4], {"after_idle": True}, s[5]) for s in TWO_STEPS]
    (rank,) = summarize(document_of(slices, ended=100))
    assert rank.idle == 10.0 + 6.0 + 40.0  # 44 to 50 belonged to the second step before
    assert {row.bucket: row.spent["gap"] for row in rank.rows} == {"prefill_s64": 1.0, "decode_b4": 2.0}


BUCKETS = ("decode_b4", "prefill_s64")
cuts = st.lists(st.integers(1, 60), min_size=2, max_size=40, unique=True).map(sorted)


@st.composite
def timelines(draw):
    """Slices of an engine, a stream and a thread of another process, with at most one nested in each."""
    slices = []
    for thread, kinds in (
        (ENGINE, (Kind.SCHEDULE, Kind.BUILD, Kind.WAIT, Kind.OUTPUT, Kind.SUBMIT)),
        (STREAM, (Kind.STEP,)),
        (SCHEDULER, (Kind.SCHEDULE, Kind.OUTPUT)),
    ):
        points = draw(cuts)
        for begun, ended in list(pairwise(points))[:: draw(st.integers(1, 2))]:
            kind, bucket = draw(st.sampled_from(kinds)), draw(st.sampled_from(BUCKETS))
            args = step_args(len(slices), bucket) if kind is Kind.STEP else {}
            slices.append((kind.value, kind, begun, ended, args, thread))
            inner = sorted((draw(st.integers(begun, ended)), draw(st.integers(begun, ended))))
            if inner[0] < inner[1]:
                nested = (Kind.GRAPH, Kind.SAMPLING) if kind is Kind.STEP else (Kind.BUILD, Kind.WAIT)
                choice = draw(st.sampled_from(nested))
                name = bucket if choice is Kind.GRAPH else choice.value
                slices.append((name, choice, *inner, {}, thread))
    return slices


def by_instant(slices, ended):
    """Bucket and column of each microsecond, looked up one by one; None where nobody is charged."""
    first = min(s[2] for s in slices)
    last = max(s[3] for s in slices)
    steps = sorted((s for s in slices if s[1] is Kind.STEP), key=lambda s: s[2])
    for instant in range(ended):
        inside = [s for s in slices if s[2] <= instant < s[3]]
        innermost = [
            max((s for s in inside if s[5] is thread), key=lambda s: (s[2], -s[3], slices.index(s)))
            for thread in THREADS
            if any(s[5] is thread for s in inside)
        ]
        kinds = [s[1] for s in innermost]
        step = next((s for s in inside if s[1] is Kind.STEP), None)
        if Kind.GRAPH in kinds:
            yield next(s[0] for s in innermost if s[1] is Kind.GRAPH), "graph"
        elif step is not None:
            yield step[4]["bucket"], "sampling" if Kind.SAMPLING in kinds else "build"
        elif not steps or instant < first or instant >= last:
            yield None
        else:
            following = next((s for s in steps if s[2] > instant), steps[-1])
            order = (Kind.BUILD, Kind.SCHEDULE, Kind.OUTPUT, Kind.WAIT)
            yield following[4]["bucket"], next((k.value for k in order if k in kinds), "gap")


@given(timelines())
def test_every_instant_is_counted_once_and_where_it_belongs(slices):
    (rank,) = summarize(document_of(slices, ended=70))
    wanted = {}
    for charged in by_instant(slices, 70):
        wanted[charged] = wanted.get(charged, 0) + 1
    found = {(row.bucket, "graph"): row.graph for row in rank.rows}
    found |= {(row.bucket, str(c)): row.spent[c] for row in rank.rows for c in COLUMNS}
    found = {place: spent for place, spent in found.items() if spent > 1e-6} | {None: rank.idle}
    assert found == pytest.approx({None: 0} | wanted)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=300))
def test_p99_is_numpys(durations):
    begun = np.cumsum([0, *durations[:-1]]).tolist()
    slices = []
    for number, (first, duration) in enumerate(zip(begun, durations, strict=True)):
        slices.append(("step", Kind.STEP, first, first + duration, step_args(number), STREAM))
        slices.append(("decode_b4", Kind.GRAPH, first, first + duration, {}, STREAM))
    (rank,) = summarize(document_of(slices, ended=sum(durations)))
    (row,) = rank.rows
    assert row.p99() == pytest.approx(np.percentile(durations, 99, method="inverted_cdf"))
    assert row.to_json()["mean_s"] == pytest.approx(np.mean(durations) / 1e6)
    assert row.to_json()["count"] == len(durations)


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_a_trace_has_named_rows_and_a_flow_per_step():
    events = json.loads(json.dumps(document_of(TWO_STEPS, 100)), parse_constant=refuse)["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {
        ("process_name", "rank 0"),
        ("thread_name", "engine thread"),
        ("thread_name", "stream"),
    }
    flows = {e["id"]: [] for e in events if e["ph"] in "sf"}
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]].append((event["ph"], event["ts"]))
    assert sorted(map(sorted, flows.values())) == [[("f", 17.0), ("s", 15.0)], [("f", 54.0), ("s", 53.0)]]
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == 2


def test_operators_of_torch_come_as_a_process_on_the_same_clock():
    # Torch counts from its base; 5 µs lie between the clock since 1970 and ours.
    op = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": ENGINE.pid, "tid": STREAM.tid, "ts": 20.0}
    torch_trace = {"baseTimeNanoseconds": 3_000, "traceEvents": [{**op, "dur": 2.0}, {**op, "pid": "Spans"}]}
    events = document_of(TWO_STEPS, 100, torch_trace)["traceEvents"]
    (found,) = [e for e in events if e.get("cat") == "cpu_op"]
    assert (found["ts"], found["dur"]) == (18.0, 2.0)
    (row,) = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["tid"] == found["tid"]]
    assert row == "stream"
    assert found["pid"] not in {e["pid"] for e in events if e.get("cat") == "graph"}


def test_operators_that_torch_rounded_apart_nest():
    op = {"ph": "X", "cat": "cpu_op", "pid": ENGINE.pid, "tid": 7}
    outer = {**op, "name": "outer", "ts": 10.0, "dur": 5.0}
    inner = {**op, "name": "inner", "ts": 12.0, "dur": 3.002}
    after = {**op, "name": "after", "ts": 15.001, "dur": 1.0}
    trace = {"baseTimeNanoseconds": 5_000, "traceEvents": [after, inner, outer]}
    events = document_of(TWO_STEPS, 100, trace)["traceEvents"]
    found = {e["name"]: (e["ts"], e["dur"]) for e in events if e.get("cat") == "cpu_op"}
    assert found == {"outer": (10.0, 5.0), "inner": (12.0, 3.0), "after": (15.001, 1.0)}


@pytest.mark.parametrize("name", ["a.trace.json", "a.trace.json.gz"])
def test_a_trace_is_read_back_and_nothing_else_is_left(tmp_path, name):
    document = document_of(TWO_STEPS, 100)
    write_trace(tmp_path / name, document)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (gzip.open if name.endswith("gz") else open)(tmp_path / name).read(1) in (b"{", "{")
    assert read_trace(tmp_path / name) == json.loads(json.dumps(document))


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"\x1f\x8bbroken", b'{"traceEvents": []}', b"[" * 200_000]
)
def test_what_is_no_trace_of_ours_is_said_to_be_none(tmp_path, data):
    path = tmp_path / "other.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"other\.json.*is not a trace of this engine"):
        read_trace(path)
    done = CliRunner().invoke(neuron, ["profile", "summarize", str(path)])
    assert done.exit_code == 1
    assert done.output.startswith("Error: TRACE=")
    missing = CliRunner().invoke(neuron, ["profile", "summarize", str(tmp_path / "none")])
    assert missing.exit_code == 1
    assert "cannot be read" in missing.output


def test_the_command_prints_a_row_per_bucket_and_the_same_as_json(tmp_path):
    path = tmp_path / "a.trace.json.gz"
    write_trace(path, document_of(TWO_STEPS, 100))
    shown = CliRunner().invoke(neuron, ["profile", "summarize", str(path)]).output
    rows = {line.split("  ")[0].strip(): line.split() for line in shown.splitlines() if line.strip()}
    assert rows["prefill_s64"][1:3] == ["1", "0.02"]
    assert rows["idle / other"][-2:] == ["0.05", "50.0%"]
    printed = json.loads(CliRunner().invoke(neuron, ["profile", "summarize", str(path), "--json"]).output)
    (rank,) = printed["ranks"]
    parts = [row["total_s"] for row in rank["buckets"]] + [rank["idle_or_other_s"]]
    assert math.isclose(sum(parts), 100e-6)


def stand_in(folder: Path, script: str) -> Path:
    tool = folder / "neuron-explorer"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return tool


def test_capture_runs_the_tool_as_documented(tmp_path, monkeypatch):
    stand_in(tmp_path, 'echo "$@" > "$5"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    neff = tmp_path / "graph.neff"
    neff.write_bytes(b"NEFF")
    done = CliRunner().invoke(neuron, ["profile", "capture", str(neff), "--json"])
    assert done.exit_code == 0, done.output
    written = Path(json.loads(done.output)["ntff"])
    assert written == tmp_path / "graph.ntff"
    assert written.read_text().split() == ["capture", "-n", str(neff), "-s", str(written)]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no device; exit 3", "failed with exit status 3: no device"),
        ("true", "wrote no graph.ntff"),
        ("exec sleep 30", "had not ended after 0.2 s"),
    ],
)
def test_capture_says_why_it_failed(tmp_path, script, message):
    neff = tmp_path / "graph.neff"
    neff.write_bytes(b"NEFF")
    explorer = Explorer.find(str(stand_in(tmp_path, script)))
    with pytest.raises(DeviceError, match=message):
        explorer.capture(neff, tmp_path / "graph.ntff", timeout_s=0.2 if "sleep" in script else 30)


def test_capture_needs_the_tool_and_a_graph(tmp_path):
    with pytest.raises(DeviceError, match="no-such-tool is not on PATH"):
        Explorer.find("no-such-tool")
    explorer = Explorer.find(str(stand_in(tmp_path, "true")))
    with pytest.raises(ConfigError, match=r"none\.neff.*is no file"):
        explorer.capture(tmp_path / "none.neff", tmp_path / "a.ntff", 1)


def test_the_runtime_is_told_to_record_both_traces(tmp_path):
    variables = inspection_variables(tmp_path)
    assert variables.pop("NEURON_RT_INSPECT_OUTPUT_DIR") == str(tmp_path)
    assert set(variables) == {
        f"NEURON_RT_INSPECT_{x}" for x in ("ENABLE", "SYSTEM_PROFILE", "DEVICE_PROFILE")
    }
    assert set(variables.values()) == {"1"}


@pytest.mark.parametrize("field", ["ph", "ts", "dur", "pid", "tid", "cat", "name", "args"])
def test_a_damaged_event_is_one_line(tmp_path, field):
    document = json.loads(json.dumps(document_of(TWO_STEPS, 100)))
    for event in document["traceEvents"]:
        event.pop(field, None)
    _says_it_is_damaged(tmp_path / "damaged.json", document)


@pytest.mark.parametrize("change", [{"ranks": [{}]}, {"ranks": None}, {"ranks": [{"rank": 0, "pid": 1}]}])
def test_damaged_ranks_are_one_line(tmp_path, change):
    document = document_of(TWO_STEPS, 100)
    document["otherData"]["neuron"] |= change
    _says_it_is_damaged(tmp_path / "damaged.json", document)
    _says_it_is_damaged(tmp_path / "damaged.json", {**document_of(TWO_STEPS, 100), "traceEvents": None})


def _says_it_is_damaged(path, document):
    path.write_text(json.dumps(document))
    done = CliRunner().invoke(neuron, ["profile", "summarize", str(path)])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert done.output.startswith("Error: TRACE=") and len(done.output.splitlines()) == 1
