# SPDX-License-Identifier: Apache-2.0
"""Random programs of views and writes: the pure graph equals eager execution and torch.func.functionalize bit for bit.

A program is first run eagerly, which drops steps that make no sense for the tensors at hand; a list of calls is left.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.reinplace import reinplace
from neuron_core.graphs.passes import default_passes
from neuron_core.graphs.passes.schema import is_mutating
from neuron_core.graphs.program import Part, TensorSpec

_library = torch.library.Library("neuron_programs", "FRAGMENT")


def _register(schema, function, meta):
    _library.define(schema)
    _library.impl(schema.partition("(")[0], function, "CPU")
    _library.impl(schema.partition("(")[0], meta, "Meta")


def _exchange_(x, y, number):
    x.add_(number)
    y.sub_(number)
    return x * 2


def _touch(x, y=None):
    x.add_(1)
    if y is not None:
        y.add_(x.numel())


_register("shift_(Tensor(a!) x, Tensor y) -> ()", lambda x, y: (x.mul_(2).add_(y), None)[1], lambda *_: None)
_register("shift(Tensor x, Tensor y) -> Tensor", lambda x, y: x * 2 + y, lambda x, y: x.clone())
_register("exchange_(Tensor(a!) x, Tensor(b!) y, int n) -> Tensor", _exchange_, lambda x, y, n: x.clone())
_exchange = [lambda x, y, n: ((x + n) * 2, x + n, y - n)] * 2
_register("exchange(Tensor x, Tensor y, int n) -> (Tensor, Tensor, Tensor)", *_exchange)
_register("touch(Tensor(a!) x, Tensor(b!)? y=None) -> ()", _touch, lambda x, y=None: None)

LAYOUTS = {
    "rows": lambda v: v[:4, :6].clone(),
    "columns": lambda v: v[:, :4].clone().t(),
    "gaps": lambda v: v[:, ::2],
    "offset": lambda v: v.view(-1)[5:41].view(6, 6),
    "integers": lambda v: v[:4, :6].to(torch.int32),
}


def inputs_of(layout):
    """Three inputs of small integers, in a layout each."""
    generator = torch.Generator().manual_seed(7)
    return [LAYOUTS[kind](torch.randint(-9, 10, (6, 8), generator=generator).float()) for kind in layout]


def elements(tensor):
    """Offsets of all elements in storage."""
    ranges = (
        range(0, n * s, s) if s else [0] * n for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return [sum(offsets) for offsets in itertools.product(*ranges)]


def overlaps_itself(tensor):
    return len(set(elements(tensor))) < tensor.numel()


def fitted(source, shape, dtype):
    """A new tensor of ``shape`` that repeats the elements of ``source``, within what every dtype can hold."""
    if source.numel() == 0:
        return torch.ones(shape, dtype=dtype)
    where = torch.arange(math.prod(shape)) % source.numel()
    repeated = source.reshape(-1)[where].reshape(shape)
    if repeated.is_floating_point() and not dtype.is_floating_point:
        repeated = repeated.nan_to_num(1).clamp(0, 99)
    return repeated.to(dtype)


def pick(items, number):
    return items[number % len(items)]


def at(t, a, index):
    """The subscript that applies ``index`` to dimension ``a``."""
    return (*(slice(None),) * (a % t.dim()), index)


def part_of(t, a, b):
    return slice(a - 5, None if b % 3 == 0 else b, 1 + b % 3)


def size(t, a):
    return t.shape[a % t.dim()]


def dtype_view(t, a, b):
    others = {
        torch.float32: [torch.int32, torch.int16, torch.uint8],
        torch.int32: [torch.float32, torch.int16],
    }
    return t.view(pick(others.get(t.dtype, [torch.float32]), b))


def strided_view(t, a, b):
    """The tensor's own strides, some doubled, in one order or the other."""
    double = [2 if a % 3 == 0 and n > 2 else 1 for n in t.shape]
    sizes = [(n + f - 1) // f for n, f in zip(t.shape, double, strict=True)]
    strides = [s * f for s, f in zip(t.stride(), double, strict=True)]
    order = slice(None, None, -1 if a % 2 else 1)
    return t.as_strided([max(1, n - b % 2) for n in sizes][order], strides[order])


VIEWS = {
    "unsqueeze": lambda t, a, b: t.unsqueeze(a % (t.dim() + 1)),
    "squeeze": lambda t, a, b: t.squeeze(),
    "expand": lambda t, a, b: t.unsqueeze(0).expand(1 + b % 3, *t.shape),
    "alias": lambda t, a, b: t.detach() if b % 2 else t[...],
    "flat": lambda t, a, b: t.view(-1),
    "fold": lambda t, a, b: t.view(2, -1, 2),
    "slice": lambda t, a, b: t[at(t, a, part_of(t, a, b))],
    "tuple": lambda t, a, b: t[(*at(t, a, b % size(t, a)), None, ...)],
    "select": lambda t, a, b: t.select(a % t.dim(), b % size(t, a) - (size(t, a) if a % 2 else 0)),
    "transpose": lambda t, a, b: t.transpose(a % t.dim(), b % t.dim()),
    "movedim": lambda t, a, b: t.movedim(a % t.dim(), b % t.dim()),
    "permute": lambda t, a, b: t.permute(*range(a % t.dim(), t.dim()), *range(a % t.dim())),
    "narrow": lambda t, a, b: t.narrow(a % t.dim(), b % size(t, a), (size(t, a) - b % size(t, a) + 1) // 2),
    "unfold": lambda t, a, b: t.unfold(a % t.dim(), 1 + b % size(t, a), 1 + a % 4),
    "split": lambda t, a, b: pick(t.split(1 + b % size(t, a), a % t.dim()), a),
    "sizes": lambda t, a, b: pick(t.split([1, size(t, a) - 1], a % t.dim()), b),
    "chunk": lambda t, a, b: pick(t.chunk(1 + b % 3, a % t.dim()), a),
    "tensor_split": lambda t, a, b: pick(t.tensor_split(1 + b % 3, a % t.dim()), a),
    "unbind": lambda t, a, b: pick(t.unbind(a % t.dim()), b),
    "diagonal": lambda t, a, b: t.diagonal(b % 4 - 2, a % t.dim(), (a + 1) % t.dim()),
    "dtype": dtype_view,
    "strided": strided_view,
}


@dataclass
class Step:
    """Operands of one write or pure call, found again in a list of values."""

    index: int
    other: int
    a: int
    b: int
    apart: bool

    def of(self, values):
        return values[self.index], values[self.other]

    def operand(self, values, shape=None):
        """Elements of the other tensor: itself, in the shape, or in one that broadcasts to it."""
        t, other = self.of(values)
        shape = t.shape if shape is None else shape
        if self.apart and other.shape == shape and other.dtype == t.dtype and self.b % 2:
            return other
        smaller = [1 if (self.a >> i) & 1 else n for i, n in enumerate(shape)]
        return fitted(other, smaller[self.a % 2 :], t.dtype)

    def whole(self, values):
        t, other = self.of(values)
        return fitted(other, t.shape, t.dtype)

    def rows(self, t):
        """Different indices into dimension ``a``."""
        return torch.arange(1 + self.b % size(t, self.a)).add(self.b).remainder(size(t, self.a))

    def places(self, t):
        """``rows`` in the shape that scatter takes, and that shape."""
        dim = self.a % t.dim()
        shape = [len(self.rows(t)) if i == dim else n for i, n in enumerate(t.shape)]
        return self.rows(t).reshape([-1 if i == dim else 1 for i in range(t.dim())]).expand(shape), shape

    def indexed(self, name, values, *more, **options):
        """An operator that takes ``(dim, index, source)``."""
        t = values[self.index]
        places, shape = self.places(t)
        where = places if name.startswith("scatter") else self.rows(t)
        getattr(t, name)(self.a % t.dim(), where, self.operand(values, shape).expand(shape), *more, **options)

    def put(self, values, accumulate):
        t = values[self.index]
        where = [None] * (self.a % t.dim()) + [self.rows(t)]
        torch.ops.aten.index_put_(t, where, self.operand(values, self.places(t)[1]), accumulate)

    def assign(self, values, index):
        values[self.index][index] = self.b % 5


WRITES = {
    "fill": lambda s, v: v[s.index].fill_(s.b),
    "fill with": lambda s, v: v[s.index].fill_(fitted(v[s.other], (), v[s.index].dtype)),
    "zero": lambda s, v: v[s.index].zero_(),
    "add": lambda s, v: v[s.index].add_(s.operand(v), alpha=2),
    "sub": lambda s, v: v[s.index].sub_(1),
    "neg": lambda s, v: v[s.index].neg_().abs_() if s.b % 2 else v[s.index].neg_(),
    "relu": lambda s, v: v[s.index].relu_(),
    "copy": lambda s, v: v[s.index].copy_(s.operand(v)),
    "convert": lambda s, v: v[s.index].copy_(s.whole(v).clamp(0, 9).to(torch.bfloat16)),
    "masked_fill": lambda s, v: v[s.index].masked_fill_(s.operand(v) > s.b, s.b % 7),
    "masked_scatter": lambda s, v: v[s.index].masked_scatter_(s.operand(v) > s.b, s.whole(v)),
    "tril": lambda s, v: v[s.index].tril_(s.a % 3 - 1),
    "out": lambda s, v: torch.maximum(s.operand(v).expand_as(v[s.index]), v[s.index].clone(), out=v[s.index]),
    "fill_diagonal": lambda s, v: v[s.index].fill_diagonal_(s.b),
    "custom": lambda s, v: torch.ops.neuron_programs.shift_(v[s.index], s.operand(v)),
    "touch": lambda s, v: torch.ops.neuron_programs.touch(v[s.index], v[s.other] if s.b % 3 else None),
    "exchange": lambda s, v: v.append(torch.ops.neuron_programs.exchange_(*s.of(v), s.b)),
    "foreach": lambda s, v: torch._foreach_add_(list(s.of(v)), 3),
    "put": lambda s, v: s.put(v, False),
    "accumulate": lambda s, v: s.put(v, True),
    "scatter": lambda s, v: s.indexed("scatter_", v),
    "scatter_add": lambda s, v: s.indexed("scatter_add_", v),
    "scatter_reduce": lambda s, v: s.indexed("scatter_reduce_", v, "amax"),
    "index_copy": lambda s, v: s.indexed("index_copy_", v),
    "index_add": lambda s, v: s.indexed("index_add_", v, alpha=2),
    "index_fill": lambda s, v: v[s.index].index_fill_(s.a % v[s.index].dim(), s.rows(v[s.index]), s.b),
    "set int": lambda s, v: s.assign(v, at(v[s.index], s.a, s.b % size(v[s.index], s.a))),
    "set slice": lambda s, v: s.assign(v, at(v[s.index], s.a, part_of(v[s.index], s.a, s.b))),
    "set tuple": lambda s, v: s.assign(v, (..., s.b % size(v[s.index], -1))),
    "set mask": lambda s, v: s.assign(v, v[s.index] > s.b),
    "set tensor": lambda s, v: s.assign(v, at(v[s.index], s.a, s.rows(v[s.index]))),
}
TWO_TENSORS = ("touch", "exchange", "foreach")
UNKNOWN_TO_FUNCTIONALIZE = ("custom", "touch", "exchange", "fill_diagonal")

PURE = {
    "scale": lambda s, v: v[s.index] * 2 - s.b,
    "combine": lambda s, v: v[s.index] + s.whole(v),
    "clone": lambda s, v: v[s.index].clone(),
    "compact": lambda s, v: v[s.index].clone(memory_format=torch.contiguous_format),
    "sort": lambda s, v: v[s.index].sort(s.a % v[s.index].dim()).values,
    "max": lambda s, v: v[s.index].amax(s.a % v[s.index].dim()),
    "cat": lambda s, v: torch.cat([v[s.index], v[s.index]], s.a % v[s.index].dim()),
    "turned": lambda s, v: v[s.index].clone().t_(),
}


def call_of(kind, step):
    if kind in WRITES:
        return lambda v: WRITES[kind](step, v)
    if kind in PURE:
        return lambda v: v.append(PURE[kind](step, v))
    return lambda v: v.append(VIEWS[kind](v[step.index], step.a, step.b))


class Program:
    """The steps that make sense for inputs of a layout."""

    def __init__(self, layout, steps=()):
        self.values = inputs_of(layout)
        self.storage, self.repeats = [0, 1, 2], [False] * 3
        self.bases = list(self.values)
        self.calls = []
        # torch.func.functionalize refuses custom writes and is wrong about unfold and repeated elements.
        self.comparable = True
        # torch's fake index_fill of a view with gaps has other strides than the real one.
        self.exact_strides = True
        for step in steps:
            self.add(*step)

    def run(self, *inputs):
        values = list(inputs)
        for call in self.calls:
            call(values)
        return tuple(values)

    def add(self, kind, first, second, a, b):
        """Keep a step, or drop it when it cannot be: says which."""
        index, other = len(self.values) - 1 - first % len(self.values), second % len(self.values)
        step = Step(index, other, a, b, self.storage[index] != self.storage[other])
        call = call_of(kind, step)
        try:
            if self.values[index].numel() > 200 or not self.is_defined(kind, step):
                return False
            call(self.values)
        except (RuntimeError, IndexError, ZeroDivisionError):
            return False  # the tensor has no such view, or its dtype no such operator
        self.calls.append(call)
        self.note(kind, index)
        return True

    def is_defined(self, kind, step):
        """Whether eager execution of a step has one meaning that a graph can have."""
        t, other = step.of(self.values)
        base = self.bases[self.storage[step.index]]
        dense = len(set(elements(base))) == max(elements(base), default=-1) + 1
        if kind in ("strided", "fill_diagonal"):
            return t.numel() > 0 and dense and t.element_size() == base.element_size()
        if kind == "dtype" and self.repeats[step.index]:
            return VIEWS[kind](t, step.a, step.b).element_size() == t.element_size()
        both = step.apart and other.numel() > 0 and not overlaps_itself(other)
        if (kind in TWO_TENSORS and not both) or (kind == "set mask" and t.dim() == 0):
            return False  # the mask would be a branch on its only element
        return kind not in WRITES or kind in ("fill", "zero") or not overlaps_itself(t)

    def note(self, kind, index):
        for _ in range(len(self.storage), len(self.values)):
            is_view = kind in VIEWS
            self.storage.append(self.storage[index] if is_view else len(self.bases))
            self.repeats.append(is_view and (self.repeats[index] or kind in ("unfold", "expand")))
            self.bases += [] if is_view else [self.values[-1]]
        self.exact_strides &= kind != "index_fill"
        repeated = kind in ("fill", "zero") and overlaps_itself(self.values[index])
        if kind in (*UNKNOWN_TO_FUNCTIONALIZE, "strided", "unfold") or repeated:
            self.comparable = False


numbers = st.integers(0, 9)
kinds = st.one_of(st.sampled_from(list(VIEWS)), st.sampled_from(list(WRITES)), st.sampled_from(list(PURE)))
program_steps = st.lists(st.tuples(kinds, numbers, numbers, numbers, numbers), min_size=2, max_size=12)
layouts = st.tuples(*[st.sampled_from(["rows", *LAYOUTS])] * 3)


def same_bits(mine, other):
    """Equal dtype, shape and bits; one not-a-number is as good as another."""
    if mine.is_floating_point():
        mine, other = (torch.where(t.isnan(), torch.nan, t).view(torch.int32) for t in (mine, other))
    return mine.dtype == other.dtype and torch.equal(mine, other)


def has_spec(spec, result):
    """Strides matter to whoever takes the output."""
    steps = zip(spec.shape, spec.stride, result.stride(), strict=True)
    same_strides = result.numel() == 0 or all(n == 1 or ours == real for n, ours, real in steps)
    return (spec.shape, spec.dtype) == (result.shape, result.dtype) and same_strides


def functionalized(program, inputs):
    """None where torch trips over strides of its own making, or over a view of an expanded tensor."""
    try:
        return torch.func.functionalize(program.run)(*inputs)
    except RuntimeError as error:
        if any(text in str(error) for text in ("view size is not compatible", "INTERNAL ASSERT FAILED")):
            return None
        raise


def check(layout, steps, folder):
    program = Program(layout, steps)
    expected_inputs = inputs_of(layout)
    expected = program.run(*expected_inputs)
    outputs = tuple(f"out{index}" for index in range(len(expected)))
    module = nn.Module()
    module.forward = program.run
    part = Part("test", module, ("x", "y", "z"), outputs)
    graph = capture(part, tuple(TensorSpec.of(tensor) for tensor in inputs_of(layout)))
    graph = default_passes(torch.device("cpu")).run(graph)
    assert not any(is_mutating(node) for node in graph.module.graph.nodes)
    FxCompiler().compile(graph, folder)
    runs = {"pure": FxCompiler().load(folder), "in place again": lambda args: reinplace(graph)(*args)}
    if program.comparable:
        runs["functionalize"] = lambda args: functionalized(program, args)
    for name, run in runs.items():
        inputs = inputs_of(layout)
        results = run(list(inputs))
        if results is None:
            continue
        pairs = zip((*results, *inputs), (*expected, *expected_inputs), strict=True)
        assert [same_bits(*pair) for pair in pairs] == [True] * (len(expected) + 3), name
        if name == "pure" and program.exact_strides:
            assert all(itertools.starmap(has_spec, zip(graph.output_specs(), results, strict=True)))


_settings = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(_settings, max_examples=150)
@given(layout=layouts, steps=program_steps)
def test_random_programs(layout, steps, tmp_path):
    check(layout, steps, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(_settings, max_examples=5000)
@given(layout=layouts, steps=program_steps)
def test_many_random_programs(layout, steps, tmp_path):
    check(layout, steps, tmp_path)


@pytest.mark.parametrize("kind", [*VIEWS, *WRITES, *PURE])
def test_every_kind_of_step_is_part_of_some_program(kind, tmp_path):
    """A kind that never fits would be drawn and dropped without a word."""
    layout = ("rows", "columns", "integers")
    kept = [a for a in range(10) if Program(layout).add(kind, 2, 1, a, a + 1)]
    assert kept
    for a in kept:
        check(layout, [(kind, 2, 1, a, a + 1), ("copy", 1, 0, 0, 1), ("add", 0, 3, 0, 1)], tmp_path)
