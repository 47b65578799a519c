# SPDX-License-Identifier: Apache-2.0
"""The path to the vendor compiler, with a stand-in executable that behaves as documents and users describe it."""

import ctypes
import json
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from neuron_core.environ import Environment
from neuron_core.errors import CacheError, CompileError
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.captured import CapturedFiles, graph_function
from neuron_core.graphs.compilers.neuronx import NeuronxCompiler, write_captured
from neuron_core.graphs.compilers.vendor_errors import VendorCompileError
from neuron_core.graphs.compilers.vendor_wheels import VendorToolsMissing, wheels_hint
from neuron_core.graphs.key import graph_key
from neuron_core.graphs.passes import default_passes
from neuron_core.graphs.program import Part, TensorSpec

STAND_IN = """#!{python} -S
import json, os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
todo = json.loads((here / "todo.json").read_text())
if sys.argv[1:] == ["--version"]:
    print("NeuronX Compiler version " + todo["version"] + "\\n\\nPython version 3.11.7\\nNumPy version 2.1.0")
    sys.exit(todo["version_exit"])
options = dict(word.split("=", 1) for word in sys.argv[3:] if "=" in word)
with (here / "calls").open("a") as calls:
    calls.write(json.dumps({{"argv": sys.argv[1:], "cwd": os.getcwd()}}) + "\\n")
pathlib.Path("scratch.bin").write_bytes(b"x")
print(todo["stdout"], flush=True)
if todo["logfile"]:
    pathlib.Path(options["--logfile"]).write_text(todo["logfile"])
if todo["neff"]:
    pathlib.Path(options["--output"]).write_bytes(bytes.fromhex(todo["neff"]))
if todo["hang"]:
    child = os.fork()
    if child:
        (here / "pids").write_text(f"{{os.getpid()}} {{child}}")
    time.sleep(300)
if todo["signal"]:
    os.kill(os.getpid(), todo["signal"])
sys.exit(todo["exit"])
"""


class NeffHeaderStruct(ctypes.Structure):
    """The published C structure; ctypes lays it out as the C compiler would."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("pkg", "header_size", "data_size", "major", "minor")),
        ("build", ctypes.c_uint8 * 128),
        ("num_tpb", ctypes.c_uint32),
        ("hash", ctypes.c_uint8 * 32),
        ("uuid", ctypes.c_uint8 * 16),
        ("name", ctypes.c_char * 256),
        ("requested_tpb_count", ctypes.c_uint32),
        ("tpb_per_node", ctypes.c_uint8 * 64),
        ("feature_bits", ctypes.c_uint64),
        ("lnc_size", ctypes.c_uint32),
        ("pad", ctypes.c_uint8 * 468),
    ]


def neff(lnc=2, data=b"tar archive", **fields):
    values = {"header_size": 1024, "data_size": len(data), "major": 2, "minor": 0, "name": b"graph", **fields}
    header = NeffHeaderStruct(lnc_size=lnc, **values)
    header.build[:5] = b"2.27\0"
    return bytes(header) + data


class Lowering:
    """The border to torch_xla: writes what the real one writes, without it."""

    def __init__(self, version="torch_xla 2.9.0 abc", missing=""):
        self._version, self._missing = version, missing

    def version(self):
        return self._version

    def missing(self):
        return self._missing

    def lower(self, folder):
        (folder / "graph.hlo.pb").write_bytes(b"hlo")
        specs = CapturedFiles.read(folder).specs
        facts = {
            "parameters": list(range(len(specs))),
            "num_outputs": 2,
            "aliases": [[1, 2]],
            "constants": {},
        }
        (folder / "hlo.json").write_text(json.dumps(facts))


class Count(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x, total):
        total.add_(x.sum())
        return x * self.weight


def captured(size=3):
    spec, scalar = TensorSpec.contiguous((size,), torch.float32), TensorSpec.contiguous((), torch.float32)
    part = Part("layer.0", Count(size), ("x", "total"), ("y",))
    return default_passes(torch.device("cpu")).run(capture(part, (spec, scalar), bucket="decode_b4"))


@pytest.fixture
def graph():
    return captured()


@pytest.fixture
def vendor(tmp_path):
    """The stand-in: ``vendor(exit=70, ...)`` says what its next runs do, and gives a compiler that uses it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "neuronx-cc"
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)

    def behave(target="trn2", *, lowering=None, keep=True, **todo):
        usual = {
            "version": "2.27.5334.0+abcd1234",
            "version_exit": 0,
            "stdout": ".",
            "logfile": "",
            "exit": 0,
        }
        usual |= {"neff": neff().hex(), "hang": False, "signal": 0}
        arguments = {name: todo.pop(name) for name in ("lnc", "flags", "timeout_s") if name in todo}
        (folder / "todo.json").write_text(json.dumps(usual | todo))
        return NeuronxCompiler(
            target,
            executable=str(path),
            lowering=lowering or Lowering(),
            keep_dir=tmp_path / "kept" if keep else None,
            environment=Environment.read({}),
            **arguments,
        )

    return SimpleNamespace(behave=behave, folder=folder, path=path, kept=tmp_path / "kept")


@pytest.fixture
def staging(tmp_path):
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


def test_a_compile_hands_over_the_hlo_and_leaves_the_neff_and_what_loading_needs(vendor, graph, staging):
    compiler = vendor.behave(flags={"verbose": "info", "--optlevel": 2})
    compiler.compile(graph, staging)
    (call,) = [json.loads(line) for line in (vendor.folder / "calls").read_text().splitlines()]
    command, source, *options = call["argv"]
    assert (command, source) == ("compile", str(staging / "graph.hlo.pb"))
    assert options[-2:] == [f"--output={staging}/graph.neff", f"--logfile={call['cwd']}/log-neuron-cc.txt"]
    assert options[:-2] == [
        "--framework=XLA",
        "--target=trn2",
        "--model-type=transformer",
        "--auto-cast=none",
        "--optlevel=2",
        "--logical-nc-config=2",
        "--verbose=info",
    ]
    assert "--verbose" not in compiler.flags()  # it does not change the artifact
    names = {path.name for path in staging.iterdir()}
    assert names == {
        *("graph.py", "graph.json", "inputs.json", "graph.hlo.pb", "hlo.json"),
        *("graph.neff", "neff.json", "neuronx-cc.log"),
    }
    facts = json.loads((staging / "neff.json").read_text())
    assert facts["neuronx_cc"] == "2.27.5334.0+abcd1234" and facts["header"]["lnc"] == 2
    assert not vendor.kept.exists()


def test_the_captured_graph_on_disk_is_the_graph(graph, tmp_path):
    write_captured(graph, tmp_path / "a" / "b")
    files = CapturedFiles.read(tmp_path / "a" / "b")
    assert (files.label, files.names, files.num_weights) == (graph.label, ("weight", "x", "total"), 1)
    assert files.specs == graph.input_specs and files.groups == {}
    assert [spec.shape for spec in files.outputs] == [(3,), ()]
    assert files.metadata.io_map == ((1, 2),)
    weight, x, total = torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6]), torch.tensor(7.0)
    y, new_total = graph_function(tmp_path / "a" / "b")(None, weight, x, total)
    assert torch.equal(y, weight * x) and new_total == 22 and total == 7
    (tmp_path / "a" / "b" / "inputs.json").write_text("{}")
    with pytest.raises(CacheError, match=r"inputs\.json does not describe a captured graph"):
        CapturedFiles.read(tmp_path / "a" / "b")


@pytest.mark.parametrize(
    ("todo", "words", "recordable"),
    [
        ({"exit": 70, "stdout": "[NCC_EVRF009] memory"}, ["[NCC_EVRF009]", "HBM"], True),
        ({"exit": 1, "logfile": "ERROR [NCC_EVRF007] many"}, ["[NCC_EVRF007]", "instructions"], True),
        ({"signal": 9}, ["RAM, not HBM", "ran beside it"], False),
        ({"exit": 70, "stdout": "[F137] neuronx-cc was forcibly killed"}, ["[F137]", "RAM, not HBM"], False),
        ({"signal": 6}, ["aborted"], False),
        ({"exit": 0, "neff": ""}, ["reported success and wrote no NEFF"], False),
        ({"exit": 0, "neff": b"NEFF".hex()}, ["graph.neff is no NEFF: 4 bytes"], False),
        ({"exit": 0, "neff": neff(lnc=1).hex()}, ["for lnc 1 instead of 2"], False),
        ({"exit": 3, "stdout": "libxml2.so.2: cannot open"}, ["exit status 3", "libxml2"], False),
    ],
)
def test_a_failed_compile_says_why_and_keeps_graph_hlo_and_log(
    vendor, graph, staging, todo, words, recordable
):
    compiler = vendor.behave(**todo)
    with pytest.raises(VendorCompileError) as caught:
        compiler.compile(graph, staging)
    message = str(caught.value)
    assert all(word in message for word in [*words, "part 'layer.0' of bucket decode_b4", "2.27.5334.0"])
    assert caught.value.recordable is recordable
    (kept,) = vendor.kept.iterdir()
    assert kept.name.startswith("decode_b4-layer.0-")
    assert f"log: {kept / 'neuronx-cc.log'}" in message
    names = {path.name for path in kept.iterdir()}
    assert {"graph.py", "graph.json", "inputs.json", "graph.hlo.pb", "neuronx-cc.log"} <= names
    assert "work" not in names
    log = (kept / "neuronx-cc.log").read_text()
    assert todo.get("stdout", ".") in log and todo.get("logfile", "") in log


def test_without_a_place_to_keep_it_no_path_is_promised(vendor, graph, staging):
    with pytest.raises(VendorCompileError) as caught:
        vendor.behave(exit=70, stdout="[NCC_EVRF009] memory", keep=False).compile(graph, staging)
    assert str(staging) not in str(caught.value) and "[NCC_EVRF009] memory" in str(caught.value)


def test_graphs_that_differ_are_kept_apart(vendor, tmp_path):
    compiler = vendor.behave(exit=70)
    for index, size in enumerate((3, 4, 3)):
        folder = tmp_path / f"staging{index}"
        folder.mkdir()
        with pytest.raises(VendorCompileError):
            compiler.compile(captured(size), folder)
    assert len(list(vendor.kept.iterdir())) == 2


def test_a_compiler_that_hangs_is_ended_with_what_it_started(vendor, graph, staging):
    with pytest.raises(VendorCompileError, match="did not end within 2 s") as caught:
        vendor.behave(hang=True, timeout_s=2).compile(graph, staging)
    assert not caught.value.recordable
    pids = [int(pid) for pid in (vendor.folder / "pids").read_text().split()]
    deadline = time.monotonic() + 10
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(map(_runs, pids))


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("todo", "reason"),
    [
        ({"version": "1.0.post1"}, "is not the real compiler"),
        ({"version_exit": 1}, r"is not the real compiler \(--version: exit status 1"),
    ],
)
def test_a_placeholder_of_the_compiler_counts_as_missing(vendor, graph, staging, todo, reason):
    compiler = vendor.behave(**todo)
    assert compiler.version() == "absent"
    with pytest.raises(VendorToolsMissing, match=reason):
        compiler.compile(graph, staging)
    assert not (vendor.folder / "calls").exists()


def test_missing_tools_are_listed_with_their_wheels_and_the_graph_is_kept(graph, staging, tmp_path):
    compiler = NeuronxCompiler(
        "trn2",
        executable=str(tmp_path / "nowhere" / "neuronx-cc"),
        lowering=Lowering(missing="no lowering to HLO (No module named 'torch_xla')"),
        keep_dir=tmp_path / "kept",
        environment=Environment.read({}),
    )
    assert compiler.version() == "absent"
    with pytest.raises(VendorToolsMissing) as caught:
        compiler.compile(graph, staging)
    message = str(caught.value)
    assert "neuronx-cc is not installed" in message and "No module named 'torch_xla'" in message
    assert wheels_hint(torch.__version__) in message and not caught.value.recordable
    assert f"the captured graph is kept in {caught.value.captured}" in message
    assert CapturedFiles.read(caught.value.captured).specs == graph.input_specs


def test_target_lnc_flags_and_versions_are_in_the_key_and_nothing_else_is(vendor, graph):
    def components(*arguments, **todo):
        return graph_key(graph, vendor.behave(*arguments, **todo), ("pass",))

    usual = components()
    assert components() == usual and components(flags={"verbose": "debug"}) == usual
    assert components("trn3").differences(usual) == ("compiler", "target")
    assert components(lnc=1).differences(usual) == ("compiler", "target")
    assert components(flags={"optlevel": 3}).differences(usual) == ("compiler",)
    assert components(lowering=Lowering("torch_xla 2.9.0 abd")).differences(usual) == ("compiler",)


def test_another_compiler_version_is_another_key(vendor, graph, tmp_path):
    usual = graph_key(graph, vendor.behave(), ())
    vendor.behave(version="2.28.1.0+ff")
    copy = tmp_path / "newer" / "neuronx-cc"
    vendor.folder.rename(copy.parent)
    newer = NeuronxCompiler(
        "trn2", executable=str(copy), lowering=Lowering(), environment=Environment.read({})
    )
    assert newer.version().startswith("neuronx-cc 2.28.1.0+ff; ")
    assert graph_key(graph, newer, ()).differences(usual) == ("compiler",)


def test_the_cache_runs_the_compiler_once_per_key(vendor, graph, tmp_path):
    compiler = vendor.behave()
    key = graph_key(graph, compiler, ())

    def compile_into(folder):
        compiler.compile(graph, folder)
        return compiler.describe()

    for compiled in (True, False):
        entry, was_compiled = CompileCache(tmp_path / "cache").get_or_compile(key, compile_into)
        assert was_compiled is compiled
    assert len((vendor.folder / "calls").read_text().splitlines()) == 1
    assert (entry.path / "graph.neff").read_bytes() == neff()


def test_missing_tools_are_not_remembered_as_a_failure(vendor, graph, tmp_path):
    key = graph_key(graph, vendor.behave(), ())

    def with_lowering(missing):
        compiler = vendor.behave(lowering=Lowering(missing=missing))

        def compile_into(folder):
            compiler.compile(graph, folder)
            return {}

        return CompileCache(tmp_path / "cache").get_or_compile(key, compile_into)

    with pytest.raises(VendorToolsMissing):
        with_lowering("no torch_xla")
    assert with_lowering("")[1]


def test_a_lowering_that_fails_stops_before_the_compiler(vendor, graph, staging):
    class Failing(Lowering):
        def lower(self, folder):
            raise CompileError("aten.nonzero has no static form")

    with pytest.raises(CompileError, match="no static form"):
        vendor.behave(lowering=Failing()).compile(graph, staging)
    assert not (vendor.folder / "calls").exists()
    assert len(list(vendor.kept.iterdir())) == 1
