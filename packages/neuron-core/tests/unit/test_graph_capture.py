# SPDX-License-Identifier: Apache-2.0
"""Capture lifts weights to inputs, allocates nothing and refuses by name what a static graph cannot hold."""

import pytest
import torch
from torch import nn

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.key import canonical_text, graph_key
from neuron_core.graphs.passes import default_passes
from neuron_core.graphs.program import Part, TensorSpec

SPEC = TensorSpec.contiguous((2, 4), torch.float32)


class Model(nn.Module):
    def __init__(self, body=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.body = body
        self.table = torch.arange(8.0)

    def forward(self, x, **static):
        if self.body is not None:
            return self.body(self, x)
        return self.linear(x) * self.scale * static.get("times", 1)


def captured(body=None, static=(), model=None):
    return capture(Part("layer", model or Model(body), ("x",), ("y",), static), (SPEC,), bucket="decode_b2")


def branch(model, x):
    if x.sum() > 0:
        return x
    return -x


def test_weights_come_first_in_named_order_and_can_be_replaced():
    graph = captured()
    assert graph.weights == ("linear.weight", "linear.bias", "scale") and graph.inputs == ("x",)
    other, x = Model(), torch.randn(2, 4)
    weights = [other.linear.weight, other.linear.bias, other.scale]
    with torch.no_grad():
        assert torch.equal(graph.module(*weights, x)[0], other(x))


def test_meta_weights_are_enough():
    with torch.device("meta"):
        model = Model()
    model.table = None
    assert canonical_text(captured(model=model)) == canonical_text(captured())


def test_static_arguments_are_baked_in():
    assert canonical_text(captured(static=(("times", 2),))) != canonical_text(captured())


def test_capture_does_not_disturb_the_module():
    model = Model()
    before = dict(model.named_parameters())
    captured(model=model)
    assert all(before[name] is tensor for name, tensor in model.named_parameters())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (branch, "x.sum\\(\\) > 0.*depends on tensor data"),
        (lambda model, x: x[x > 0].sum(), "lambda model, x: x\\[x > 0\\].*depends on tensor data"),
        (lambda model, x: x * x.max().item(), "depends on tensor data"),
        (lambda model, x: x + model.table[:4], "register_buffer"),
        (lambda model, x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), "tensor constant.*torch.full"),
        (lambda model, x: x @ x, "RuntimeError"),
    ],
    ids=["if", "mask", "item", "attribute", "constant", "shape"],
)
def test_what_cannot_be_captured_names_part_bucket_and_line(body, reason):
    with pytest.raises(
        CompileError, match=f"part 'layer' of bucket decode_b2.*test_graph_capture.py.*{reason}"
    ):
        captured(body)


def test_a_scalar_tensor_is_part_of_the_graph():
    graph = captured(lambda model, x: x + torch.tensor(0.1, dtype=torch.float64))
    x = torch.randn(2, 4)
    assert torch.equal(graph.module(*Model().state_dict().values(), x)[0], x + torch.tensor(0.1).double())


def key_of(body=None, **options):
    graph = default_passes(torch.device("cpu")).run(captured(body, **options))
    return graph_key(graph, FxCompiler(), ())


def test_the_key_ignores_names_and_sees_constants():
    def first(model, x):
        return x * 2 + 1

    def second(model, renamed):
        doubled = renamed * 2
        return doubled + 1

    assert key_of(first) == key_of(second)
    assert key_of(first).differences(key_of(lambda model, x: x * 2 + 2)) == ("graph",)


def test_an_operator_of_unknown_source_is_refused():
    library = torch.library.Library("neuron_test_unknown", "FRAGMENT")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x.clone(), "CompositeExplicitAutograd")
    with pytest.raises(CompileError, match=r"register_op_sources.*neuron_test_unknown"):
        key_of(lambda model, x: torch.ops.neuron_test_unknown.same(x))
