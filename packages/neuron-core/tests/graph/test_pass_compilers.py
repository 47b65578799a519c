# SPDX-License-Identifier: Apache-2.0
"""What the passes say of memory holds in compiled graphs: values and writes equal eager execution in both compilers."""

import pytest
import torch
from torch import nn

from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.inductor import InductorCompiler
from neuron_core.graphs.passes import default_passes, shared_inputs
from neuron_core.graphs.program import Part, TensorSpec

_library = torch.library.Library("neuron_pairs", "FRAGMENT")


def _register(schema, function, meta):
    _library.define(schema)
    _library.impl(schema.partition("(")[0], function, "CPU")
    _library.impl(schema.partition("(")[0], meta, "Meta")


def _store_(keys, values, rows):
    keys[0], values[1] = rows, rows + 1


def _store(keys, values, rows):
    keys, values = keys.clone(), values.clone()
    _store_(keys, values, rows)
    return keys, values


_register("store_(Tensor(a!) k, Tensor(b!) v, Tensor rows) -> ()", _store_, lambda *_: None)
_register(
    "store(Tensor k, Tensor v, Tensor rows) -> (Tensor, Tensor)",
    _store,
    lambda k, v, _: (k.clone(), v.clone()),
)
_register("store_untwinned(Tensor(a!) k, Tensor(b!) v, Tensor rows) -> ()", _store_, lambda *_: None)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.fixture(params=["fx", "inductor"])
def build(request, tmp_path, session_toolchain):
    def build(function, inputs, outputs):
        part = Part(
            "test", Call(function), tuple("abcd"[: len(inputs)]), tuple(f"out{i}" for i in range(outputs))
        )
        graph = capture(part, tuple(TensorSpec.of(t) for t in inputs), shared=shared_inputs(inputs))
        graph = default_passes(torch.device("cpu")).run(graph)
        compiler = (
            FxCompiler() if request.param == "fx" else InductorCompiler(session_toolchain, num_threads=1)
        )
        compiler.compile(graph, tmp_path)
        return compiler.load(tmp_path)

    return build


def passed_on(x, y):
    return y, x.add_(y), y.t(), y


def two_writes(name):
    def program(x, y):
        getattr(torch.ops.neuron_pairs, name)(x[:2], y.view(3, 6), x[2] * 2)
        return x.sum(0) + y.view(3, 6)[1]

    return program


def batch_norm(x, y):
    return nn.functional.batch_norm(y, x[0], x[1].abs_(), training=True)


def strided(x, y):
    x.as_strided((2, 3), (7, 2), 1).mul_(2)
    y.view(torch.int32).as_strided((3,), (6,)).add_(1)
    return x + y


def windows(x, y):
    x.unfold(1, 2, 3).add_(1)
    x.unsqueeze(0).expand(2, 3, 6)[1, 2].copy_(y[0])
    return x * y


@pytest.mark.parametrize(
    ("function", "outputs"),
    [
        pytest.param(passed_on, 4, id="passed on"),
        pytest.param(two_writes("store_"), 1, id="two writes"),
        pytest.param(two_writes("store_untwinned"), 1, id="two writes without twin"),
        pytest.param(batch_norm, 1, id="batch norm"),
        pytest.param(strided, 1, id="strided"),
        pytest.param(windows, 1, id="windows"),
    ],
)
def test_compiled_graphs_do_to_memory_what_eager_execution_does(build, function, outputs):
    torch.manual_seed(0)
    inputs = torch.randn(3, 6), torch.randn(3, 6)
    ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    places = [tensor.data_ptr() for tensor in ours]
    call = build(function, inputs, outputs)
    expected = function(*theirs)
    results = call(list(ours))
    for mine, other in zip(
        (*results, *ours), (*(expected if outputs > 1 else [expected]), *theirs), strict=True
    ):
        torch.testing.assert_close(mine, other)
    assert [tensor.data_ptr() for tensor in ours] == places


def test_a_passed_on_input_is_the_same_memory_before_and_after(build):
    inputs = torch.randn(3, 6), torch.randn(3, 6)
    _, x, _, _ = build(passed_on, inputs, 4)(list(inputs))
    first, _, turned, last = build(passed_on, inputs, 4)([x.clone(), inputs[1]])
    assert {t.data_ptr() for t in (first, turned, last)} == {inputs[1].data_ptr()}


def test_duplicate_inputs_of_compiled_graphs(build):
    def function(a, b):
        a.mul_(2)
        b.add_(1)
        return a + b

    base = torch.randn(3, 6)
    expected = function(mine := base.clone(), mine)
    (result,) = build(function, [base, base], 1)([base, base])
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(base, mine)
