# SPDX-License-Identifier: Apache-2.0
"""Each way to write in place, by name: the pure graph leaves what eager execution leaves, or says what it cannot."""

import pytest
import torch
from torch import nn

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.reinplace import reinplace
from neuron_core.graphs.passes import OutOfPlace, PassManager, default_passes
from neuron_core.graphs.passes.schema import is_mutating
from neuron_core.graphs.program import Part, TensorSpec

_library = torch.library.Library("neuron_writes", "FRAGMENT")


def _register(schema, function, meta):
    _library.define(schema)
    _library.impl(schema.partition("(")[0], function, "CPU")
    _library.impl(schema.partition("(")[0], meta, "Meta")


def _rotate_(x, y, z):
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept + z)
    return kept * 2


def _rotate(x, y, z):
    x, y = x.clone(), y.clone()
    return _rotate_(x, y, z), x, y


def _like(x, *_):
    return torch.empty_like(x)


def _all_add_(tensors, number):
    for tensor in tensors:
        tensor.add_(number)


def _nothing(*_):
    return None


_register("rotate_(Tensor(a!) x, Tensor(b!) y, Tensor z) -> Tensor", _rotate_, _like)
_register(
    "rotate(Tensor x, Tensor y, Tensor z) -> (Tensor, Tensor, Tensor)", _rotate, lambda x, y, z: (x, x, y)
)
_register("rotate_untwinned(Tensor(a!) x, Tensor(b!) y, Tensor z) -> Tensor", _rotate_, _like)
_register("add_all(Tensor(a!)[] tensors, int number) -> ()", _all_add_, _nothing)
_register("short_(Tensor(a!) x, Tensor(b!) y) -> ()", _nothing, _nothing)
_register("short(Tensor x, Tensor y) -> Tensor", _like, _like)
_library.define("half(Tensor(a) x) -> Tensor(a)")
_library.impl("half", lambda x: x[: x.shape[0] // 2], "CompositeExplicitAutograd")


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def captured(function, *inputs):
    part = Part("test", Call(function), tuple(f"in{i}" for i in range(len(inputs))), ("out",))
    return capture(part, tuple(TensorSpec.of(tensor) for tensor in inputs))


def check(function, *inputs, folder):
    graph = default_passes(torch.device("cpu")).run(captured(function, *inputs))
    assert not any(is_mutating(node) for node in graph.module.graph.nodes)
    theirs = [tensor.clone() for tensor in inputs]
    torch.manual_seed(0)
    expected = function(*theirs).clone()
    assert any(not torch.equal(old, new) for old, new in zip(inputs, theirs, strict=True))
    FxCompiler().compile(graph, folder)
    for call in (FxCompiler().load(folder), lambda args: reinplace(graph)(*args)):
        ours = [tensor.clone() for tensor in inputs]
        torch.manual_seed(0)
        (result,) = call(list(ours))
        for mine, other in zip((result, *ours), (expected, *theirs), strict=True):
            assert mine.dtype == other.dtype and torch.equal(mine, other)
    return graph


def assigned(index, value):
    def program(x, y):
        x[index] = value
        return x * 2

    return program


def from_y(index, take):
    def program(x, y):
        x[index] = take(y)
        return x * 2

    return program


MASK = torch.tensor([True, False, True, False])


def masked_rows(x, y):
    x[y[:, 0] > 0] = y[:, :6].sum()
    return x * 2


def masked_elements(x, y):
    x[x > 0] = 0.5
    return x * 2


def integer_rows(x, y):
    x[torch.arange(2) + 1] = y[:2]
    return x * 2


def integer_elements(x, y):
    x[torch.arange(3), torch.arange(3) + 2] = 9
    return x * 2


def view_of_view(x, y):
    x[1:].t()[::2][-1][0:3:2] = y[0, :2]
    return x * 2


def through(view, write):
    def program(x, y):
        write(view(x), y)
        return x * 2

    return program


def add(view, y):
    return view.add_(y.flatten()[: view.numel()].reshape(view.shape))


def turned_temporary(x, y):
    kept = x.clone()
    kept.t_().unsqueeze_(0)
    kept[0, 1].mul_(3)
    x.copy_(kept[0].t())
    return kept.squeeze_()


def batch_norm(x, y):
    return torch.nn.functional.batch_norm(y, x[0], x[1].abs_(), training=True)


def batch_norm_eval(x, y):
    return torch.nn.functional.batch_norm(y, x[0], x[1].abs_(), training=False)


def swapped_kinds(x, y):
    values, order = x.sort(0)
    torch.sort(y, 0, out=(x, order))
    return values + order


@pytest.mark.parametrize(
    "program",
    [
        assigned(1, 3.0),
        assigned(-1, 3.0),
        assigned(slice(1, None, 2), 3.0),
        assigned(slice(-3, -1), 3.0),
        assigned((slice(None), slice(0, 5, 3)), 3.0),
        assigned((2, ..., 1), 3.0),
        assigned((None, 0, slice(2)), 3.0),
        from_y((slice(None), 0), lambda y: y[:, 3]),
        from_y(slice(0, 4, 2), lambda y: y[1]),
        from_y(..., lambda y: y.double()),
        masked_rows,
        masked_elements,
        integer_rows,
        integer_elements,
        view_of_view,
        through(lambda x: x, lambda v, y: v.copy_(y[:, :1])),
        through(lambda x: x, lambda v, y: v.copy_(y.to(torch.int64))),
        through(lambda x: x[1], lambda v, y: v.fill_(y[0, 0])),
        through(lambda x: x, lambda v, y: v.masked_fill_(y > 0, y.sum())),
        through(lambda x: x.t(), lambda v, y: v.masked_scatter_(v > 0, y)),
        through(lambda x: x, lambda v, y: v.scatter_(1, y.argsort(1), y)),
        through(lambda x: x[:, ::2], lambda v, y: v.scatter_add_(0, y[:2, :3].argsort(0), y[:2, :3])),
        through(lambda x: x, lambda v, y: v.index_put_((torch.zeros(4, dtype=torch.long),), y, accumulate=True)),
        through(lambda x: x.t(), lambda v, y: v.index_copy_(1, torch.arange(4).flip(0), y.t())),
        through(lambda x: x, lambda v, y: v.index_add_(0, torch.zeros(2, dtype=torch.long), y[:2])),
        through(lambda x: x, lambda v, y: v.index_fill_(1, torch.arange(2) * 2, 7.0)),
        through(lambda x: x, lambda v, y: v.put_(torch.arange(4) * 3, y[:, 0])),
        through(lambda x: x, lambda v, y: v.clamp_(-0.5, 0.5).lerp_(y, 0.25).addcmul_(y, y)),
        through(lambda x: x[:2, :2], lambda v, y: v.addmm_(y[:2], y[:2].t())),
        through(lambda x: x, lambda v, y: torch.add(y, 1, out=v)),
        through(lambda x: x, lambda v, y: torch._foreach_mul_([v[0], v[2]], [y[0], y[1]])),
        through(
            lambda x: x,
            lambda v, y: v.copy_(v.clone().uniform_() + y.clone().normal_()).add_(y.clone().bernoulli_(0.3)),
        ),
        through(lambda x: x.view(torch.int32), lambda v, y: v.__ixor__(1)),
        through(lambda x: x, lambda v, y: v.copy_(v.to(torch.int32).__ilshift__(2))),
        through(lambda x: x.view(torch.int16), lambda v, y: v[:, 1::2].add_(1)),
        through(lambda x: x.view(torch.uint8).view(torch.int64), lambda v, y: v.bitwise_not_()),
        through(lambda x: x.unsqueeze(0).expand(3, 4, 6), lambda v, y: v.fill_(4)),
        through(lambda x: x.unsqueeze(0).expand(3, 4, 6)[2, 1], lambda v, y: v.copy_(y[0])),
        through(lambda x: x.expand(1, 4, 6).view(torch.int16), lambda v, y: v.zero_()),
        through(lambda x: x[:1].expand(4, 6).view(torch.int32)[2], lambda v, y: v.add_(1)),
        through(lambda x: x.unfold(1, 2, 2), add),
        through(lambda x: x.unfold(1, 6, 2), lambda v, y: v.add_(1)),
        through(lambda x: x.unfold(1, 2, 3), add),
        through(lambda x: x.unfold(1, 2, 4), add),
        through(lambda x: x.unfold(1, 4, 1)[:, 1], add),
        through(lambda x: x.unfold(0, 3, 1), lambda v, y: v.zero_()),
        through(lambda x: x.chunk(3, 1)[1].split([1, 3])[1], add),
        through(lambda x: x.split([1, 3, 2], 1)[2], add),
        through(lambda x: x, lambda v, y: v.bernoulli_().add_(y)),
        through(lambda x: x.unbind(1)[-1], add),
        through(lambda x: x.unsafe_chunk(2)[1], add),
        through(lambda x: x.narrow(1, 2, 3).movedim(0, 1), add),
        through(lambda x: x.diagonal(1), add),
        through(lambda x: x.as_strided((2, 3), (12, 2), 1), add),
        through(lambda x: x.t().as_strided((3, 2), (2, 7)), add),
        through(lambda x: x.as_strided((2, 3, 4), (12, 4, 1)), add),
        through(lambda x: x[:, :4], lambda v, y: v.fill_diagonal_(8)),
        through(lambda x: torch.view_as_complex(x.view(4, 3, 2)), lambda v, y: v.imag.add_(y[:, :3])),
        through(lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().imag, lambda v, y: v.mul_(3)),
        turned_temporary,
        batch_norm,
        batch_norm_eval,
        swapped_kinds,
    ],
)  # fmt: skip
def test_a_write_leaves_what_eager_execution_leaves(program, tmp_path):
    torch.manual_seed(1)
    check(program, torch.randn(4, 6), torch.randn(4, 6), folder=tmp_path)


def sum_of_the_view(x):
    (turned := x.t()).tril_()
    return turned.sum(0)


def sum_of_its_base(x):
    x.t().tril_()
    return x.sum(0)


def sum_of_what_follows(x):
    (turned := x.t()).tril_()
    return (turned * 1.1).reshape(-1, 2).sum(0)


def sum_of_what_follows_a_view_with_gaps(x):
    (turned := x.t()[::2]).tril_()
    return (turned * 1.1).sum(0)


def sum_of_a_repeated_tensor(x):
    x.t().expand(2, *x.t().shape)[1].mul_(2)
    x.t().unfold(1, 3, 2)[:, 1:2].mul_(3)
    return x.t().sum(0)


@pytest.mark.parametrize(
    "program",
    [
        sum_of_the_view,
        sum_of_its_base,
        sum_of_what_follows,
        sum_of_what_follows_a_view_with_gaps,
        sum_of_a_repeated_tensor,
    ],
)
def test_sums_after_a_write_round_as_eager_sums_do(program, tmp_path):
    """A sum follows the order of memory, and the out-of-place ``tril`` of a transposed view is row-major."""
    torch.manual_seed(0)
    x = torch.randn(300, 700)
    assert not torch.equal(x.t().contiguous().t().sum(0), x.sum(0)) and x.t().tril().is_contiguous()
    check(program, x, folder=tmp_path)
    check(program, torch.randn(700, 300).t(), folder=tmp_path)


def views_of_what_lost_its_gaps(x):
    x.transpose(1, 2).tril_()
    scattered = torch.slice_scatter(x, x[:1] * 2, 0, 0, 1)
    halves = scattered.split(2, 1)[0].view(3, 8) + x.split(2, 1)[0].view(3, 8)
    return scattered.view(3, 16) + halves.sum() + x.view(torch.int16).sum()


def test_views_of_a_tensor_with_gaps_are_not_asked_for_strides_it_no_longer_has(tmp_path):
    check(views_of_what_lost_its_gaps, torch.randint(9, (6, 4, 4)).float()[::2], folder=tmp_path)


def writes_to_nothing(x, y):
    x[2:2].add_(1)
    x.as_strided((0, 3), (6, 1)).add_(1)
    x.unfold(0, 4, 1)[1:].add_(1)
    return x.mul_(2)


def test_a_write_to_no_element_changes_nothing(tmp_path):
    check(writes_to_nothing, torch.randn(4, 6), torch.randn(4, 6), folder=tmp_path)


@pytest.mark.parametrize("name", ["rotate_", "rotate_untwinned"])
def test_an_operator_that_writes_two_tensors(name, tmp_path):
    def program(x, y):
        kept = getattr(torch.ops.neuron_writes, name)(x[0], y.t()[1, :4], y.t()[0, :4].clone())
        return kept + x[0]

    graph = check(program, torch.randn(2, 4), torch.randn(5, 3), folder=tmp_path)
    assert graph.io_map == {1: 0, 2: 1}
    targets = {str(node.target) for node in graph.module.graph.nodes}
    assert ("neuron_writes.rotate.default" in targets) == (name == "rotate_")


def test_an_operator_that_writes_a_list(tmp_path):
    def program(x, y):
        torch.ops.neuron_writes.add_all([x[0], x[2], y], 3)
        return x.sum(0) + y[0]

    check(program, torch.randn(3, 4), torch.randn(2, 4), folder=tmp_path)


def test_a_view_of_a_custom_operator_is_taken_again_after_a_write(tmp_path):
    def program(x):
        half = torch.ops.neuron_writes.half(x)
        x.mul_(2)
        return half + 1

    check(program, torch.randn(4, 3), folder=tmp_path)


def test_writes_through_one_view_after_another_copy_no_pool():
    def program(pool, rows, slots):
        flat = pool.view(-1, 8)
        for shift in range(3):
            torch.ops.neuron_test.write_(flat, rows + shift, slots + shift)
        return torch.ops.neuron_test.read(flat, slots)

    inputs = torch.zeros(3, 4, 8), torch.randn(2, 8), torch.tensor([1, 7], dtype=torch.int32)
    graph = default_passes(torch.device("cpu")).run(captured(program, *inputs))
    targets = [str(node.target) for node in reinplace(graph).graph.nodes]
    assert targets.count("neuron_test.write_.default") == 3
    assert not {"neuron_test.write.default", "aten.copy_.default"} & set(targets)


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        (lambda x, y: x.t_(), r"t_.*changes the shape of an input"),
        (lambda x, y: x.clone().resize_(3, 2), r"resize_.*changes the shape"),
        (lambda x, y: x.set_(y), r"set_.*changes the shape"),
        (lambda x, y: x.unfold(0, 3, 1).add_(1), r"add_.*aten\.unfold.*share memory"),
        (lambda x, y: torch.ops.neuron_writes.half(x).add_(1), r"half.*cannot be made out of place"),
        (lambda x, y: torch.ops.neuron_writes.short_(x, y) or x, r"short.*returns 1 values.*of x, y"),
        (lambda x, y: torch.ops.neuron_writes.rotate_(x[:2], x[1:3], y[:2]), r"rotate_.*share elements"),
        (lambda x, y: x.view(torch.int16).add_(1).as_strided((2,), (1,)), r"as_strided.*int16"),
        (
            lambda x, y: x[:1].expand(4, 6).view(torch.int16)[0].add_(1),
            r"aten\.expand.*another size",
        ),
    ],
)
def test_what_cannot_be_rewritten_names_node_and_line(program, complaint):
    with pytest.raises(CompileError, match=complaint) as caught:
        default_passes(torch.device("cpu")).run(captured(program, torch.randn(4, 6), torch.randn(4, 6)))
    assert f"test_pass_out_of_place.py:{program.__code__.co_firstlineno}: " in str(caught.value)
    assert str(caught.value).startswith("part 'test'")


def test_a_gap_in_memory_is_not_read():
    gaps = torch.randn(4, 12)[:, ::2]
    with pytest.raises(CompileError, match=r"as_strided.*\(12, 2\)"):
        default_passes(torch.device("cpu")).run(
            captured(lambda x: (x.add_(1), x.as_strided((4,), (1,)))[1], gaps)
        )


def test_out_of_place_alone_would_lose_a_written_input():
    with pytest.raises(CompileError, match=r"writes input 'in0'.*run alias_analysis before"):
        PassManager((OutOfPlace(),)).run(captured(lambda x: x.add_(1), torch.ones(2)))
