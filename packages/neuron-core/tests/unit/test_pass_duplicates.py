# SPDX-License-Identifier: Apache-2.0
"""Inputs that are one tensor are merged; the oracle is eager execution on tensors that really share memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from neuron_core.errors import CompileError
from neuron_core.graphs.capture import SharedInputs, capture
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.key import canonical_text
from neuron_core.graphs.passes import (
    DuplicateInputs,
    PassManager,
    default_passes,
    repeated_inputs,
    shared_inputs,
)
from neuron_core.graphs.passes.memory import share_elements
from neuron_core.graphs.program import Part, TensorSpec


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def captured(function, inputs):
    part = Part("test", Call(function), tuple("abcdef"[: len(inputs)]), ("out",))
    return capture(part, tuple(TensorSpec.of(t) for t in inputs), shared=shared_inputs(inputs))


def test_a_write_to_one_is_a_write_to_both(tmp_path):
    def function(a, b, c):
        a.mul_(2)
        b.add_(c)
        return a + b

    base, other = torch.randn(4, 3), torch.randn(3)
    expected = function(mine := base.clone(), mine, other)
    graph = default_passes(torch.device("cpu")).run(captured(function, [base, base, other]))
    assert graph.shared.same_as == {1: 0} and graph.io_map == {1: 0}
    FxCompiler().compile(graph, tmp_path)
    assert torch.equal(FxCompiler().load(tmp_path)([base, base, other])[0], expected)
    assert torch.equal(base, mine)


def test_the_calling_convention_stays_and_the_duplicate_is_not_looked_at(tmp_path):
    inputs = [weight := torch.randn(3, 3), torch.randn(3), weight]
    graph = default_passes(torch.device("cpu")).run(captured(lambda a, b, c: a @ b + c @ b, inputs))
    assert len(graph.placeholders()) == 3 and not graph.placeholders()[2].users
    FxCompiler().compile(graph, tmp_path)
    call = FxCompiler().load(tmp_path)
    expected = weight @ inputs[1] * 2
    torch.testing.assert_close(call(list(inputs))[0], expected)
    torch.testing.assert_close(call([*inputs[:2], torch.full((3, 3), torch.nan)])[0], expected)


def test_three_of_a_kind_and_an_output_that_is_a_duplicate():
    x = torch.randn(3)
    graph = captured(lambda a, b, c: (b * 2, c)[1], [x, x, x])
    graph = default_passes(torch.device("cpu")).run(graph)
    assert graph.shared.same_as == {1: 0, 2: 0} and graph.output_aliases == {0: 0}


def test_merging_is_seen_in_the_graph_and_so_in_its_key():
    x, y = torch.randn(3), torch.randn(3)
    texts = [
        canonical_text(PassManager((DuplicateInputs(),)).run(captured(torch.add, i)))
        for i in ([x, x], [x, y])
    ]
    assert texts[0] != texts[1]


def test_a_written_input_that_overlaps_another_is_refused_and_both_are_named():
    base = torch.randn(6)

    def function(a, b):
        return a.add_(1)[0] + b

    with pytest.raises(
        CompileError, match=r"writes input 'a' \(number 0\), which shares memory with input 'b'"
    ):
        PassManager((DuplicateInputs(),)).run(captured(function, [base[:4], base[2:]]))
    default_passes(torch.device("cpu")).run(captured(function, [base[:4], base[4:]]))
    default_passes(torch.device("cpu")).run(captured(torch.dot, [base[:4], base[2:]]))


@pytest.mark.parametrize(
    ("shared", "complaint"),
    [
        (SharedInputs({0: 1}), r"same_as=\{0: 1\}: name an earlier input"),
        (SharedInputs({1: 0, 2: 1}), r"same_as=\{2: 1\}: name an earlier input that is no duplicate"),
        (SharedInputs({3: 0}), r"same_as=\{3: 0\}: name an earlier input"),
        (SharedInputs({2: 0}), r"same_as=\{2: 0\}: .*cannot be identical"),
        (SharedInputs(overlaps=((0, 3),)), r"overlaps=\(0, 3\): name two of the 3 inputs"),
    ],
)
def test_a_description_that_cannot_be_is_refused(shared, complaint):
    part = Part("test", Call(lambda a, b, c: a + b), ("a", "b", "c"), ("out",))
    specs = [TensorSpec.contiguous(shape, torch.float32) for shape in ((2,), (2,), (1, 2))]
    with pytest.raises(CompileError, match=complaint):
        capture(part, tuple(specs), shared=shared)


def touched(tensor):
    """Bytes of memory a tensor reaches, one by one."""
    places = {tensor.storage_offset() * tensor.element_size()}
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = {place + i * step * tensor.element_size() for place in places for i in range(size)}
    return {place + byte for place in places for byte in range(tensor.element_size())}


view = st.tuples(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=3),
    st.integers(0, 20),
    st.sampled_from([torch.float32, torch.int16, torch.float64]),
)


@settings(max_examples=300, deadline=None)
@given(views=st.lists(view, min_size=2, max_size=4), kind=st.sampled_from(["real", "meta"]))
def test_sharing_equals_a_comparison_byte_by_byte(views, kind):
    memory = torch.zeros(2048, dtype=torch.uint8, device="cpu" if kind == "real" else "meta")
    tensors = [
        memory.view(dtype).as_strided([n for n, _ in dims], [s for _, s in dims], start)
        for dims, start, dtype in views
    ]
    identity = [(TensorSpec.of(tensor), tensor.storage_offset()) for tensor in tensors]
    shared = shared_inputs(tensors)
    for second in range(len(tensors)):
        full = [i for i in range(second) if touched(tensors[i]) & touched(tensors[second])]
        same = [i for i in full if identity[i] == identity[second]]
        assert shared.same_as.get(second) == (same[0] if same else None)
        for i in range(second):
            assert share_elements(tensors[i], tensors[second]) == (i in full)
            expected = i in full and not same and i not in shared.same_as
            assert ((i, second) in shared.overlaps) == expected


def test_two_owners_of_one_memory_share_it():
    array = torch.arange(6).numpy()
    shared = shared_inputs([torch.from_numpy(array), torch.from_numpy(array), torch.from_numpy(array[2:])])
    assert shared == SharedInputs({1: 0}, ((0, 2),))


def test_tensors_without_data_are_told_apart_by_their_storage():
    first, second = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert not share_elements(first, second) and share_elements(first, first[3:])
    assert shared_inputs([first, second, first]) == SharedInputs({2: 0})


def test_parameters_of_a_module_that_share_memory():
    module = nn.Module()
    module.table = nn.Parameter(torch.randn(4, 4))
    module.head = nn.Parameter(module.table.data)
    module.first_row = nn.Parameter(module.table.data[0])
    assert shared_inputs(list(module.parameters())) == SharedInputs({1: 0}, ((0, 2),))


def test_a_value_that_a_part_takes_twice_is_one_input(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([2.0]), requires_grad=False)

        def forward(self, a, b, c):
            return (a.mul_(self.scale), c + b)[1]

    part = Part("twice", Twice(), ("x", "y", "x"), ("z",))
    assert repeated_inputs(part) == SharedInputs({3: 1})
    spec = TensorSpec.contiguous((3,), torch.float32)
    graph = default_passes(torch.device("cpu")).run(capture(part, (spec,) * 3, shared=repeated_inputs(part)))
    FxCompiler().compile(graph, tmp_path)
    x, y = torch.randn(3), torch.randn(3)
    (result,) = FxCompiler().load(tmp_path)([part.module.scale, x, y, x])
    assert torch.equal(result, x + y)
