# SPDX-License-Identifier: Apache-2.0
"""Programs run as written, and a signature is equal exactly when two modules may share a graph."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from neuron_core.errors import CompileError
from neuron_core.graphs.program import Part, Program, TensorSpec
from neuron_core.graphs.signature import structural_signature, tensors_of


class Layer(nn.Module):
    def __init__(self, width, eps=1e-5, extra=None):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.eps = eps
        self.extra = extra

    def forward(self, x, y):
        return self.linear(x) * self.eps, y + 1


@dataclass(frozen=True)
class Shape:
    heads: int


class Uncomparable:
    pass


def test_equal_modules_share_whatever_their_weights():
    assert structural_signature(Layer(4)) == structural_signature(Layer(4))


@pytest.mark.parametrize(
    "other",
    [
        Layer(5),
        Layer(4, eps=1e-6),
        Layer(4).to(torch.bfloat16),
        Layer(4).eval(),
        Layer(4, extra=Shape(2)),
        Layer(4, extra=[1, "a"]),
        nn.Sequential(Layer(4)),
    ],
    ids=["shape", "attribute", "dtype", "training", "dataclass", "list", "class"],
)
def test_a_difference_capture_could_see_changes_the_signature(other):
    assert structural_signature(other) not in (None, structural_signature(Layer(4)))


def test_stride_of_a_weight_is_part_of_the_signature():
    other = Layer(4)
    other.linear.weight = nn.Parameter(other.linear.weight.detach().t())
    assert structural_signature(other) != structural_signature(Layer(4))


def test_values_of_dataclasses_and_functions_are_compared():
    assert structural_signature(Layer(4, extra=Shape(2))) == structural_signature(Layer(4, extra=Shape(2)))
    assert structural_signature(Layer(4, extra=Shape(2))) != structural_signature(Layer(4, extra=Shape(3)))
    silu = structural_signature(Layer(4, extra=nn.functional.silu))
    assert silu is not None and silu != structural_signature(Layer(4, extra=nn.functional.gelu))


@pytest.mark.parametrize("extra", [Uncomparable(), lambda x: x, {"a": Uncomparable()}])
def test_what_cannot_be_compared_shares_with_nothing(extra):
    assert structural_signature(Layer(4, extra=extra)) is None


def test_a_hook_makes_a_module_unique():
    hooked = Layer(4)
    hooked.linear.register_forward_hook(lambda *_: None)
    assert structural_signature(hooked) is None


def test_tied_weights_are_one_input():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    assert list(tensors_of(model)) == ["a.weight", "a.bias", "b.bias"]


def test_inputs_are_names_no_earlier_part_produced():
    layer = Layer(4)
    parts = (
        Part("first", layer, ("x", "y"), ("x", "z")),
        Part("second", layer, ("z", "w"), ("y", "z")),
    )
    assert Program(parts, ("z", "given")[:1]).inputs() == ("x", "y", "w")
    with pytest.raises(CompileError, match="given"):
        Program(parts, ("given",))


def test_run_eager_equals_calling_the_modules():
    torch.manual_seed(0)
    first, second = Layer(4), Layer(4)
    program = Program(
        (Part("a", first, ("x", "y"), ("x", "y")), Part("b", second, ("x", "y"), ("x", "y"))), ("x", "y")
    )
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    with torch.no_grad():
        got = program.run_eager({"x": x, "y": y})
        want = second(*first(x, y))
    assert torch.equal(got["x"], want[0]) and torch.equal(got["y"], want[1])


def test_a_part_that_returns_another_number_of_tensors_is_named():
    program = Program((Part("odd", Layer(4), ("x", "y"), ("x",)),), ("x",))
    with pytest.raises(CompileError, match="'odd'"):
        program.run_eager({"x": torch.ones(1, 4), "y": torch.ones(1)})


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(2, 3), torch.empty(4, 6, dtype=torch.bfloat16).t(), torch.empty((), dtype=torch.int32)],
)
def test_specs_survive_json(tensor):
    spec = TensorSpec.of(tensor)
    assert TensorSpec.from_json(spec.to_json()) == spec
    assert (spec.shape, spec.stride, spec.dtype) == (tuple(tensor.shape), tensor.stride(), tensor.dtype)


def test_a_contiguous_spec_has_torchs_stride():
    assert TensorSpec.contiguous((2, 3, 5), torch.float32).stride == torch.empty(2, 3, 5).stride()
