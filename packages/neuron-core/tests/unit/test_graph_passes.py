# SPDX-License-Identifier: Apache-2.0
"""After the passes a graph is pure, and equals eager execution bit for bit, mutations included."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from neuron_core.errors import CompileError, ConfigError
from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.reinplace import reinplace
from neuron_core.graphs.passes import AliasAnalysis, DeviceRewrite, OutOfPlace, PassManager, default_passes
from neuron_core.graphs.passes.schema import is_mutating
from neuron_core.graphs.program import Part, TensorSpec


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def pure_graph(function, *inputs, outputs=1):
    names = tuple(f"in{index}" for index in range(len(inputs)))
    part = Part("test", Call(function), names, tuple(f"out{index}" for index in range(outputs)))
    specs = tuple(TensorSpec.of(tensor) for tensor in inputs)
    return default_passes(torch.device("cpu")).run(capture(part, specs))


def check(function, *inputs, tmp_path, outputs=1):
    """Eager and compiled agree bit for bit on results and on what they left in the inputs."""
    graph = pure_graph(function, *inputs, outputs=outputs)
    assert not any(is_mutating(node) for node in graph.module.graph.nodes)
    ours, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    expected = function(*theirs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    expected = [tensor.clone() for tensor in expected]
    FxCompiler().compile(graph, tmp_path)
    got = FxCompiler().load(tmp_path)(list(ours))
    assert len(got) == len(expected)
    for mine, other in zip((*got, *ours), (*expected, *theirs), strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)
    second = [x.clone() for x in inputs]
    for mine, other in zip(reinplace(graph)(*second), expected, strict=True):
        assert torch.equal(mine, other)
    for mine, other in zip(second, theirs, strict=True):
        assert torch.equal(mine, other)
    return graph


def split_write(x, y):
    left, right = x.split([2, 4], dim=1)
    right.mul_(2)
    left.copy_(right[:, :2])
    return x + y


def unbind_write(x, y):
    for row in x.unbind(0):
        row.add_(y[0])
    return x


def view_of_view(x, y):
    inner = x.view(2, 2, 6)[1].t()[1:5:2]
    inner.add_(1)
    return inner * 2, x.view(24) + y.view(24)


def stale_view(x, y):
    before = x[1]
    x.add_(y)
    late = before * 3
    before.zero_()
    return late, before, x[0]


def set_items(x, y):
    x[0] = 1
    x[1, 2:4] = y[0, :2]
    x[:, 5] += 2
    x[y > 0] = -1
    x[torch.arange(2), torch.arange(2) + 1] = 7
    return x.sum(0)


def mixed_types(x, y):
    x.add_(y.double())
    x.copy_(y.to(torch.bfloat16))
    return (x,)


def swap(x, y):
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return x - y


@pytest.mark.parametrize(
    ("function", "outputs"),
    [
        (lambda x, y: x.add_(y), 1),
        (lambda x, y: x.t().mul_(2).exp_(), 1),
        (split_write, 1),
        (unbind_write, 1),
        (view_of_view, 2),
        (stale_view, 3),
        (set_items, 1),
        (mixed_types, 1),
        (swap, 1),
        (lambda x, y: x.diagonal().copy_(y[0, :4]), 1),
        (lambda x, y: x.masked_fill_(y > 0, 3.0), 1),
        (lambda x, y: x.index_put_((torch.zeros(2, dtype=torch.long),), y[:2], accumulate=True), 1),
        (lambda x, y: (x.view(2, 2, 6).permute(1, 2, 0)[0].mul_(y[:, :2].sum()), x)[1], 1),
        (lambda x, y: x.view(torch.int32).bitwise_and_(0xFFFF).view(torch.float32), 1),
        (lambda x, y: (x, x, y), 3),
    ],
)
def test_known_programs(function, outputs, tmp_path):
    torch.manual_seed(0)
    check(function, torch.randn(4, 6), torch.randn(4, 6), tmp_path=tmp_path, outputs=outputs)


def test_every_mutated_input_is_appended_once():
    graph = pure_graph(lambda x, y, z: (x + z.add_(1)[0], y.mul_(z).t()), *torch.randn(3, 4, 4), outputs=2)
    assert graph.num_outputs == 2
    assert graph.io_map == {2: 2, 3: 1}


def test_a_pool_write_is_out_of_place_in_the_graph_and_in_place_again_for_the_cpu(tmp_path):
    def write_twice(pool, rows, slots):
        torch.ops.neuron_test.write_(pool, rows, slots)
        torch.ops.neuron_test.write_(pool.view(-1, 8), rows + 1, slots + 1)
        return torch.ops.neuron_test.read(pool, slots + 1)

    inputs = torch.zeros(3, 4, 8), torch.randn(2, 8), torch.tensor([1, 9], dtype=torch.int32)
    graph = check(write_twice, *inputs, tmp_path=tmp_path)
    targets = [str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"]
    assert targets.count("neuron_test.write.default") == 2
    again = [str(node.target) for node in reinplace(graph).graph.nodes if node.op == "call_function"]
    assert again.count("neuron_test.write_.default") == 2
    assert not {"neuron_test.write.default", "aten.copy_.default"} & set(again)


def test_a_pool_read_after_a_write_of_a_copy_keeps_the_old_value(tmp_path):
    def write(pool, rows, slots):
        old = pool.clone()
        torch.ops.neuron_test.write_(pool, rows, slots)
        return torch.ops.neuron_test.read(old, slots), torch.ops.neuron_test.read(pool, slots)

    inputs = torch.zeros(3, 4, 8), torch.randn(2, 8), torch.tensor([1, 9], dtype=torch.int32)
    check(write, *inputs, tmp_path=tmp_path, outputs=2)


def test_an_operator_without_twin_is_named_with_its_line():
    with pytest.raises(CompileError, match=r"lonely_.* no functional twin neuron_test::lonely") as caught:
        pure_graph(lambda pool: (torch.ops.neuron_test.lonely_(pool), pool)[1], torch.ones(2))
    assert "test_graph_passes.py" in str(caught.value)


def test_a_write_through_a_view_without_inverse_is_named_with_its_line():
    with pytest.raises(CompileError, match=r"test_graph_passes\.py:\d+: .*aten\.unfold"):
        pure_graph(lambda x: x.unfold(0, 3, 1).add_(1), torch.ones(6))


def test_device_rewrite_keeps_the_form_of_the_argument():
    def factory(x):
        return x + torch.ones(4, device="cpu") + torch.zeros(4, device=torch.device("cpu"))

    part = Part("test", Call(factory), ("x",), ("y",))
    graph = capture(part, (TensorSpec.contiguous((4,), torch.float32),))
    PassManager((DeviceRewrite(torch.device("meta")),)).run(graph)
    devices = [n.kwargs["device"] for n in graph.module.graph.nodes if "device" in n.kwargs]
    assert devices == [torch.device("meta")] * 2


def test_passes_can_be_switched_off_and_are_timed():
    manager = PassManager((AliasAnalysis(), OutOfPlace()), disabled=("out_of_place",))
    assert manager.names == ("alias_analysis",)
    part = Part("test", Call(lambda x: x.add_(1)), ("x",), ("y",))
    graph = manager.run(capture(part, (TensorSpec.contiguous((4,), torch.float32),)))
    assert graph.pass_seconds.keys() == {"alias_analysis"} and graph.io_map == {1: 0}
    with pytest.raises(ConfigError, match="alias_analysis"):
        PassManager((AliasAnalysis(),), disabled=("alias_analysys",))


_views = st.sampled_from(["slice0", "slice1", "step", "select", "t", "flat", "unsqueeze", "split", "roll"])
_writes = st.sampled_from(["add", "mul", "copy", "fill", "zero", "neg", "mask", "relu", "put", "scatter"])
_steps = st.lists(
    st.tuples(
        st.sampled_from(["view", "write", "pure"]), st.integers(0, 30), _views, _writes, st.integers(0, 5)
    ),
    min_size=1,
    max_size=10,
)


def _view(tensor, kind, number):
    dims = tensor.dim()
    if kind == "flat":
        return tensor.view(-1) if tensor.is_contiguous() else tensor
    if kind == "unsqueeze":
        return tensor.unsqueeze(number % (dims + 1)) if dims < 4 else tensor
    if dims == 0:
        return tensor
    dim = number % dims
    size = tensor.shape[dim]
    if kind in ("slice0", "slice1") and size > 1:
        start = number % (size - 1) if kind == "slice0" else 0
        return tensor.narrow(dim, start, size - start - (kind == "slice1"))
    if kind == "step":
        return tensor[(slice(None),) * dim + (slice(number % size, None, 2),)]
    if kind == "select":
        return tensor.select(dim, number % size)
    if kind == "split":
        pieces = tensor.split(max(size // 2, 1), dim)
        return pieces[number % len(pieces)]
    if kind == "roll":
        return tensor.permute(*range(1, dims), 0)
    if kind == "t" and dims > 1:
        return tensor.transpose(dim, (dim + 1) % dims)
    return tensor


def _write(tensor, kind, number, other):
    value = float(number) - 2
    if kind == "add":
        tensor.add_(other.sum(), alpha=2)
    elif kind == "mul":
        tensor.mul_(value)
    elif kind == "copy":
        tensor.copy_(other.flatten()[0] * value)
    elif kind == "fill":
        tensor.fill_(value)
    elif kind == "zero":
        tensor.zero_()
    elif kind == "neg":
        tensor.neg_()
    elif kind == "mask":
        tensor.masked_fill_(tensor > value, value)
    elif kind == "relu":
        tensor.relu_()
    elif kind == "put" and tensor.dim():
        tensor.index_put_((torch.zeros(1, dtype=torch.long),), other.sum(), accumulate=bool(number % 2))
    elif kind == "scatter" and tensor.dim():
        index = torch.zeros([1] * tensor.dim(), dtype=torch.long)
        tensor.scatter_(0, index, value)


def _interpreted(steps):
    def run(x, y, z):
        values = [x, y, z.clone()]
        for action, which, view, write, number in steps:
            tensor = values[which % len(values)]
            if action == "view":
                values.append(_view(tensor, view, number))
            elif action == "write":
                _write(tensor, write, number, values[(which + number) % len(values)])
            else:
                values.append(tensor * 2 + values[number % len(values)].sum())
        return tuple(values)

    return run


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps)
def test_random_programs_of_views_and_writes(steps, tmp_path):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randint(-3, 4, (4, 6), generator=generator).float() for _ in range(3)]
    pure = sum(action != "write" for action, *_ in steps)
    check(_interpreted(steps), *inputs, tmp_path=tmp_path, outputs=3 + pure)
