# SPDX-License-Identifier: Apache-2.0
"""NEFF headers, and loading through a stand-in of AWS's nrtpy with the documented names. No hardware is involved."""

import ctypes
import json
import sys

import pytest
import torch
from torch import nn

from neuron_core.environ import Environment
from neuron_core.errors import CacheError, DeviceError
from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.captured import write_captured
from neuron_core.graphs.compilers.neff import NeffHeader
from neuron_core.graphs.compilers.neuronx import NeuronxCompiler
from neuron_core.graphs.passes import default_passes
from neuron_core.graphs.program import Part, TensorSpec

# aws-neuron-sdk: neuron-runtime/nrtpy/{model,tensor,errors}.rst. The "chip" computes what the test's module does.
NRTPY = """
from types import SimpleNamespace
import numpy

class NrtError(RuntimeError):
    pass

class NrtpyTensor:
    made = []
    def __init__(self, array, name):
        self.array, self.name = array, name
    @classmethod
    def from_numpy(cls, array, name=None, core_id=0):
        cls.made.append(name)
        return cls(numpy.ascontiguousarray(array).copy(), name)
    def numpy(self):
        return self.array.copy()

class NrtpyModel:
    sizes = SIZES
    fail_load = fail_run = ""
    @classmethod
    def load_from_neff(cls, neff_path, name=None, core_id=0, cc_enabled=False, rank_id=0, world_size=1):
        if cls.fail_load:
            raise NrtError(cls.fail_load)
        model = cls()
        for kind, sizes in cls.sizes.items():
            info = {name: SimpleNamespace(size=size, shape=(size,)) for name, size in sizes.items()}
            setattr(model, f"{kind}_tensors_info", info)
        return model
    def __call__(self, inputs, outputs=None, save_trace=False, ntff_name=None):
        if self.fail_run:
            raise NrtError(self.fail_run)
        assert set(inputs) == set(self.input_tensors_info) and set(outputs) == set(self.output_tensors_info)
        total = inputs["input0"].array.view(numpy.float32)
        scale, x = (inputs[name].array.view(numpy.float32) for name in ("input2", "input10"))
        assert outputs["output1"] is inputs["input0"]
        outputs["output0"].array.view(numpy.float32)[:] = x * scale
        total += x.sum()
"""
SIZES = {"input": {"input0": 4, "input10": 12, "input2": 4}, "output": {"output1": 4, "output0": 12}}


class NeffHeaderStruct(ctypes.Structure):
    """The published C structure; ctypes lays it out as the C compiler would."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("pkg", "header_size", "data_size", "major", "minor")),
        ("build", ctypes.c_char * 128),
        ("num_tpb", ctypes.c_uint32),
        ("hash", ctypes.c_uint8 * 32),
        ("uuid", ctypes.c_uint8 * 16),
        ("name", ctypes.c_char * 256),
        ("requested_tpb_count", ctypes.c_uint32),
        ("tpb_per_node", ctypes.c_uint8 * 64),
        ("feature_bits", ctypes.c_uint64),
        ("lnc_size", ctypes.c_uint32),
        ("pad", ctypes.c_uint8 * 468),
    )


def neff(lnc=2, data=b"tar archive", **fields):
    values = {"header_size": 1024, "data_size": len(data), "major": 2, "minor": 0, "name": b"graph", **fields}
    return bytes(NeffHeaderStruct(lnc_size=lnc, build=b"2.27", **values)) + data


class Count(nn.Module):
    def forward(self, unread, x, scale, total):
        total.add_(x.sum())
        return x * scale


@pytest.fixture
def entry(tmp_path):
    """An entry as ``compile`` leaves it: three of four inputs are read, their order is the compiler's own."""
    shapes = ((5,), (3,), (1,), (1,))
    specs = tuple(TensorSpec.contiguous(shape, torch.float32) for shape in shapes)
    part = Part("count", Count(), ("unread", "x", "scale", "total"), ("y",))
    folder = tmp_path / "entry"
    write_captured(default_passes(torch.device("cpu")).run(capture(part, specs)), folder)
    facts = {"parameters": [3, 2, 1], "num_outputs": 2, "aliases": [[1, 0]], "constants": {}}
    (folder / "hlo.json").write_text(json.dumps(facts))
    (folder / "graph.neff").write_bytes(neff())
    return folder


@pytest.fixture
def nrtpy(tmp_path, monkeypatch):
    def plant(source):
        package = tmp_path / "site" / "nrtpy"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path / "site")

    monkeypatch.delitem(sys.modules, "nrtpy", raising=False)
    yield plant
    sys.modules.pop("nrtpy", None)


def compiler(lnc=2):
    return NeuronxCompiler("trn2", lnc=lnc, environment=Environment.read({}))


def test_a_graph_is_called_with_the_tensors_its_neff_names(entry, nrtpy):
    nrtpy(NRTPY.replace("SIZES", repr(SIZES)))
    call = compiler().load(entry)
    unread, x, scale, total = (
        torch.zeros(5),
        torch.tensor([1.0, 2, 3]),
        torch.tensor([2.0]),
        torch.tensor([10.0]),
    )
    for expected_total in (16.0, 22.0):
        (y,) = call([unread, x, scale, total])
        torch.testing.assert_close(y, x * scale)
        assert total.item() == expected_total  # the caller's own tensor, written in place
    made = sys.modules["nrtpy"].NrtpyTensor.made
    assert sorted(set(made)) == ["input0", "input10", "input2", "output0"]


def test_a_constant_parameter_gets_its_value(entry, nrtpy):
    nrtpy(NRTPY.replace("SIZES", repr(SIZES)))
    facts = json.loads((entry / "hlo.json").read_text())
    facts |= {"parameters": [3, -1, 1], "constants": {"1": {"dtype": "float32", "value": 0.5}}}
    (entry / "hlo.json").write_text(json.dumps(facts))
    x = torch.tensor([1.0, 2, 3])
    (y,) = compiler().load(entry)([torch.zeros(5), x, torch.zeros(1), torch.zeros(1)])
    torch.testing.assert_close(y, x / 2)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            SIZES | {"input": {"input0": 4, "input1": 4, "input2": 8}},
            "inputs in bytes.*are not those of the graph",
        ),
        (SIZES | {"output": {"output0": 12}}, "outputs in bytes"),
        (SIZES | {"input": {"x": 12, "scale": 4, "total": 4}}, "only names that end in a number are known"),
    ],
)
def test_a_neff_with_other_tensors_is_not_used(entry, nrtpy, sizes, words):
    nrtpy(NRTPY.replace("SIZES", repr(sizes)))
    with pytest.raises(CacheError, match=words):
        compiler().load(entry)


def test_the_runtimes_own_errors_are_explained(entry, nrtpy):
    nrtpy(NRTPY.replace("SIZES", repr(SIZES)))
    call = compiler().load(entry)
    model = sys.modules["nrtpy"].NrtpyModel
    model.fail_run = "NRT Error NRT_EXEC_OOB(1006): failed"
    with pytest.raises(DeviceError, match=r"running part 'count' failed with status 1006.*block tables"):
        call([torch.zeros(5), torch.zeros(3), torch.zeros(1), torch.zeros(1)])
    model.fail_load = "NRT Error NRT_RESOURCE(4): Failed to load model"
    with pytest.raises(DeviceError, match=r"loading .*graph\.neff failed with status 4.*device memory"):
        compiler().load(entry)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('this is not the package you want')", "this is not the package you want"),
        ("__version__ = '0.0.1'", "is a placeholder"),
    ],
)
def test_without_a_runtime_it_says_what_is_needed(entry, nrtpy, source, words):
    nrtpy(source)
    with pytest.raises(DeviceError, match="has not been tried on hardware") as caught:
        compiler().load(entry)
    assert words in str(caught.value) and "nrtpy" in str(caught.value)


def test_a_neff_of_another_core_size_or_a_damaged_one_is_refused_first(entry):
    with pytest.raises(CacheError, match="is for lnc 2, this process uses 1"):
        compiler(lnc=1).load(entry)
    (entry / "graph.neff").write_bytes(neff()[:-1])
    with pytest.raises(CacheError, match="truncated or damaged"):
        compiler().load(entry)


def test_the_header_is_read_as_the_published_structure(tmp_path):
    path = tmp_path / "x.neff"
    assert ctypes.sizeof(NeffHeaderStruct) == 1024
    path.write_bytes(neff(lnc=2, data=b"12345", major=3, minor=7, name=b"model"))
    assert NeffHeader.read(path) == NeffHeader(1024, 5, "3.7", "2.27", "model", 2)
    for content, words in (
        (b"", "is no NEFF: 0 bytes"),
        (neff(header_size=512), "claims 512 bytes"),
        (neff(data=b""), "truncated or damaged"),
        (neff(data_size=10**6), "truncated or damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(CacheError, match=words):
            NeffHeader.read(path)
    with pytest.raises(CacheError, match="cannot be read"):
        NeffHeader.read(tmp_path / "absent")
