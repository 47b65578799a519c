# SPDX-License-Identifier: Apache-2.0
"""After the rewrite a graph makes and moves tensors on the target alone, whichever way it named a device."""

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from neuron_core.graphs.capture import CapturedGraph, capture
from neuron_core.graphs.passes import DeviceRewrite, PassManager
from neuron_core.graphs.program import Part, TensorSpec

META, CPU = torch.device("meta"), torch.device("cpu")

_library = torch.library.Library("neuron_devices", "FRAGMENT")
_library.define("ramp(int size, str device) -> Tensor")
_library.impl("ramp", lambda size, device: torch.arange(size, device=device), "CompositeExplicitAutograd")
_library.define("ramp_like(Tensor x, Device? device=None, *, Device? keep=None) -> Tensor")
_library.impl("ramp_like", lambda x, device=None, keep=None: torch.ones_like(x, device=keep or device), "CPU")
_library.impl("ramp_like", lambda x, device=None, keep=None: torch.ones_like(x), "Meta")


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def captured(function, device):
    spec = TensorSpec.contiguous((4,), torch.float32)
    return capture(Part("test", Call(function), ("x",), ("y",)), (spec,), device)


def rewritten(graph, device):
    return PassManager((DeviceRewrite(device),)).run(graph)


PROGRAMS = {
    "factories": lambda x, d: (
        x
        + torch.zeros(4, device=d)
        + torch.ones(4, device=str(d))
        + torch.full((4,), 2.0, device=d)
        + torch.arange(4, device=d)
        + torch.empty(4, device=d).fill_(1)
        + torch.linspace(0, 1, 4, device=d)
        + torch.eye(4, device=d).sum(0)
        + torch.scalar_tensor(3, device=d)
    ),
    "new": lambda x, d: x + x.new_zeros(4) + x.new_ones(4, device=d) + x.new_full((4,), 2, device=d),
    "like": lambda x, d: (
        torch.zeros_like(x) + torch.full_like(x, 3, device=d) + torch.ones_like(x, device=str(d))
    ),
    "to": lambda x, d: (
        x.to(d) + x.double().to(str(d)) + x.to(d, torch.int32) + x.to(device=d, dtype=torch.half)
    ),
    "to, then": lambda x, d: x.to(d, torch.float64, copy=True).to(torch.float32),
    "positional": lambda x, d: (
        torch.ops.prims.device_put.default(x, d) + torch.ops.neuron_devices.ramp_like(x, d)
    ),
    "unnamed": lambda x, d: torch.ops.aten._to_copy(torch.ops.aten.ones.default([4]), device=d) + x,
    "pinned": lambda x, d: x + torch.ops.aten.zeros.default([4], device=d, pin_memory=False),
    "custom": lambda x, d: x + torch.ops.neuron_devices.ramp_like(x, keep=d),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_captured_on_the_host_runs_on_the_target(name):
    """Mixed devices would raise, and a host tensor left anywhere would show in the output."""
    graph = rewritten(captured(lambda x: PROGRAMS[name](x, CPU), CPU), META)
    (result,) = graph.module(torch.empty(4, device=META))
    assert result.device == META
    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            assert CPU not in [*node.args, *node.kwargs.values()] and "cpu" not in [
                *node.args,
                *node.kwargs.values(),
            ]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("pinned", "unnamed")])
def test_a_graph_captured_elsewhere_computes_the_right_numbers_on_the_host(name):
    graph = rewritten(captured(lambda x: PROGRAMS[name](x, META), META), CPU)
    x = torch.randn(4)
    torch.testing.assert_close(graph.module(x)[0], PROGRAMS[name](x, CPU), rtol=0, atol=0)


def test_a_string_stays_a_string_and_an_object_an_object():
    graph = captured(lambda x: x + torch.zeros(4, device="cpu"), CPU)
    ramp, ones = torch.ops.neuron_devices.ramp.default, torch.ops.aten.ones.default
    with graph.module.graph.inserting_before(graph.module.graph.output_node()):
        call = graph.module.graph.call_function
        strings = [
            call(ramp, (4, "cpu")),
            call(ramp, (4,), {"device": "cpu"}),
            call(torch.ones, (4,), {"device": "cpu"}),
        ]
        objects = [
            call(ones, ([4],), {"device": CPU}),
            call(ones, ([4],)),
            call(torch.ones, (4,), {"device": CPU}),
        ]
    rewritten(graph, torch.device("cuda", 1))
    assert [node.kwargs.get("device", node.args[-1]) for node in strings] == ["cuda:1"] * 3
    assert [node.kwargs["device"] for node in objects] == [torch.device("cuda", 1)] * 3


def test_pinned_memory_is_dropped_where_it_means_nothing():
    graph = captured(lambda x: x + torch.zeros(4, device="cpu"), CPU)
    (zeros,) = (node for node in graph.module.graph.nodes if "zeros" in node.name)
    zeros.kwargs = {**zeros.kwargs, "pin_memory": True}
    assert rewritten(graph, CPU) and zeros.kwargs["pin_memory"] is True
    assert rewritten(graph, META) and zeros.kwargs["pin_memory"] is False


def test_methods_of_a_graph_traced_above_the_operators():
    def program(x):
        return x.cuda().cpu().to("cuda").to(torch.device("cuda")).to(device="cuda:0").to(torch.float64)

    module = fx.symbolic_trace(program)
    graph = CapturedGraph("test", module, (), ("x",), (), FakeTensorMode(), 1)
    x = torch.randn(4)
    assert torch.equal(rewritten(graph, CPU).module(x), x.double())
    forms = [node.args[1] for node in module.graph.nodes if node.op == "call_method" and len(node.args) > 1]
    assert forms == [CPU, CPU, "cpu", CPU, torch.float64]


def test_what_is_already_there_is_not_touched():
    graph = captured(lambda x: PROGRAMS["factories"](x, CPU), CPU)
    before = [(node.args, node.kwargs) for node in graph.module.graph.nodes if "device" in node.kwargs]
    rewritten(graph, CPU)
    assert (
        before
        == [(node.args, node.kwargs) for node in graph.module.graph.nodes if "device" in node.kwargs][
            : len(before)
        ]
    )
