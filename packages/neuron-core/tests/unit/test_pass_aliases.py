# SPDX-License-Identifier: Apache-2.0
"""Which inputs are written and which outputs are inputs; the oracle is what eager execution does to memory."""

import pytest
import torch
from torch import nn

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import SharedInputs, capture
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.passes import AliasAnalysis, PassManager, default_passes
from neuron_core.graphs.program import Part, TensorSpec

_library = torch.library.Library("neuron_aliases", "FRAGMENT")
for _schema, _function in {
    "kernel(Tensor(a!) out, Tensor x) -> Tensor(a!)": lambda out, x: out.copy_(x),
    "two(Tensor(a!) a, Tensor(b!)? b, Tensor x) -> Tensor": lambda a, b, x: (a.copy_(x), b.copy_(x), x * 2)[
        2
    ],
    "rows(Tensor(a) x) -> Tensor(a)": lambda x: x[:1],
    "whole(Tensor(a) x) -> Tensor(a)": lambda x: x.view(x.shape),
    "either(Tensor(a) x, Tensor(a) y) -> Tensor(a)": lambda x, y: x.view(x.shape),
}.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")

ops = torch.ops.neuron_aliases


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        result = self.function(*inputs)
        return result if isinstance(result, tuple) else (result,)


def part(function, count):
    outputs = Call(function)(*(torch.randn(3, 3) for _ in range(count)))
    return Part("test", Call(function), tuple("xyzw"[:count]), tuple(f"out{i}" for i in range(len(outputs))))


SPEC = TensorSpec.contiguous((3, 3), torch.float32)


def analysed(function, count, shared=None):
    graph = capture(part(function, count), (SPEC,) * count, shared=shared)
    return PassManager((AliasAnalysis(),)).run(graph)


def in_memory(function, count):
    """Inputs whose elements change, and outputs that are exactly an input nobody writes, the first of each."""
    inputs = [torch.randn(3, 3) for _ in range(count)]
    before = [tensor.clone() for tensor in inputs]
    outputs = Call(function)(*inputs)
    written = {i for i, pair in enumerate(zip(inputs, before, strict=True)) if not torch.equal(*pair)}
    aliases = {}
    for position, output in enumerate(outputs):
        for i, tensor in enumerate(inputs):
            same = output.data_ptr() == tensor.data_ptr() and output.stride() == tensor.stride()
            same = same and output.shape == tensor.shape and output.dtype == tensor.dtype
            same = same and output.is_neg() == tensor.is_neg()
            if same and i not in written and i not in aliases.values():
                aliases[position] = i
    return written, aliases


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: x.add_(1), 1),
        (lambda x, y: (y.mul_(x), x * 2), 2),
        (lambda x, y: (x[1].t().zero_() + y[0], y), 2),
        (lambda x, y: torch.add(x, 1, out=y), 2),
        (lambda x, y: (torch.sort(x, out=(y, torch.empty(3, 3, dtype=torch.long)))[1], x), 2),
        (lambda x, y: (torch._foreach_add_([x[0], y[1]], 1.0), x + y)[1], 2),
        (lambda x, y: ops.kernel(x, y), 2),
        (lambda x, y: ops.kernel(x.t()[1], y[0])[0], 2),
        (lambda x, y, z: ops.two(x, y, z), 3),
        (lambda x, y, z: (ops.two(z, y.t(), x), x.detach()), 3),
        (lambda x, y: (nn.functional.batch_norm(y, x[0], x[1].abs_(), training=True), y), 2),
        (lambda x: (x, x), 1),
        (lambda x, y: (y, x, y), 2),
        (lambda x, y: (x.t().t(), y[:], x.view(9).view(3, 3)), 2),
        (lambda x, y: (x.t(), y[1:], x.view(9), y.view(torch.int32)), 2),
        (lambda x: (x.as_strided((3, 3), (3, 1)), x.as_strided((3, 3), (1, 3))), 1),
        (lambda x: x.clone().add_(1), 1),
        (lambda x, y: (ops.rows(x), ops.whole(y)), 2),
        (lambda x, y: (ops.rows(x).mul_(2), y), 2),
        (lambda x: (x[:2].split(1)[1].exp_(), x), 1),
        (lambda x: (x.unsafe_split(1)[1].exp_(), x), 1),
        (lambda x, y: (x + y, x * y), 2),
        (lambda x: (torch._neg_view(x), x), 1),
    ],
)  # fmt: skip
def test_maps_say_what_eager_execution_does_to_memory(function, count):
    graph = analysed(function, count)
    written, aliases = in_memory(function, count)
    assert set(graph.io_map.values()) == written and graph.output_aliases == aliases
    appended = range(graph.num_outputs, graph.num_outputs + len(written))
    assert list(graph.io_map) == list(appended) and len(graph.output_nodes()) == appended.stop
    placeholders = graph.placeholders()
    assert all(graph.output_nodes()[output] is placeholders[index] for output, index in graph.io_map.items())


def test_an_input_has_one_alias_and_an_own_output_keeps_its_place():
    graph = analysed(lambda x, y, z: (x.add_(1), x, y, y, z[0], z), 3)
    assert graph.num_outputs == 6 and graph.io_map == {6: 0} and graph.output_aliases == {2: 1, 5: 2}


def test_weights_are_inputs_too():
    norm = nn.BatchNorm1d(3)
    graph = capture(Part("norm", norm, ("x",), ("y",)), (SPEC,))
    graph = PassManager((AliasAnalysis(),)).run(graph)
    names = [graph.weights[index] for index in graph.io_map.values()]
    assert sorted(names) == ["num_batches_tracked", "running_mean", "running_var"]


def test_analysis_of_an_analysed_graph_changes_nothing():
    graph = default_passes(torch.device("cpu")).run(analysed(lambda x, y: (x.add_(y), y), 2))
    maps = dict(graph.io_map), dict(graph.output_aliases), graph.module.code
    AliasAnalysis().run(graph)
    assert (graph.io_map, graph.output_aliases, graph.module.code) == maps


def test_a_passed_on_input_stays_that_input_when_compiled(tmp_path):
    def function(x, y):
        return y, x.add_(1), y.t()

    graph = default_passes(torch.device("cpu")).run(capture(part(function, 2), (SPEC,) * 2))
    FxCompiler().compile(graph, tmp_path)
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    kept = y.clone()
    passed, _, turned = FxCompiler().load(tmp_path)([x, y])
    assert passed is y and turned.data_ptr() == y.data_ptr() and torch.equal(y, kept)


def test_a_written_input_that_shares_memory_is_refused_and_both_are_named():
    shared = SharedInputs(overlaps=((0, 1),))
    with pytest.raises(
        CompileError, match=r"add_ \(.*writes input 'x' \(number 0\).*'y' \(number 1\): pass a copy"
    ):
        analysed(lambda x, y: x.add_(1) + y, 2, shared)
    assert analysed(lambda x, y: x + y, 2, shared).io_map == {}
    with pytest.raises(CompileError, match=r"writes input 'y'.*input 'x'.*run duplicate_inputs first"):
        analysed(lambda x, y: x + y.add_(1), 2, SharedInputs({1: 0}))


def test_a_result_that_may_be_one_of_two_arguments_is_refused():
    with pytest.raises(CompileError, match=r"either.*view of any of"):
        analysed(lambda x, y: ops.either(x, y), 2)
