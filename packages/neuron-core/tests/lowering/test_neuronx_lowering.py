# SPDX-License-Identifier: Apache-2.0
"""The lowering with the real torch_xla: XLA itself reads the HLO back, and computes what PyTorch does.

torch_xla exists up to torch 2.9 on PyPI and up to 2.12 on AWS's index, so these run in an environment of their own:
`nox -s lowering`.
"""

import json

import pytest
import torch
from torch import nn
from torch_xla.core import xla_builder

import neuron_core.ops.library  # noqa: F401  defines torch.ops.neuron
from neuron_core.errors import CompileError
from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.captured import graph_function, write_captured
from neuron_core.graphs.compilers.hlo import HloFacts, XlaLowering
from neuron_core.graphs.compilers.xla_lowering import alias_field
from neuron_core.graphs.passes import default_passes
from neuron_core.graphs.program import Part, TensorSpec


class Layer(nn.Module):
    """A layer's worth of our ops: norms, rotary, KV write, paged attention, gate."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.rand(8) + 0.5)
        self.qkv = nn.Parameter(torch.randn(24, 8) / 3)
        self.up = nn.Parameter(torch.randn(16, 8) / 3)

    def forward(self, x, kv, cos, sin, slots, tables, rows, positions, unread):
        ops = torch.ops.neuron
        hidden = ops.rms_norm(x, self.norm, 1e-5)
        query, key, value = (hidden @ self.qkv.t()).view(-1, 3, 2, 4).unbind(1)
        query, key = ops.rotary(query.contiguous(), cos, sin), ops.rotary(key.contiguous(), cos, sin)
        ops.kv_write_(kv, key, value.contiguous(), slots)
        mixed = ops.paged_attention(query, kv, tables, rows, positions, 0.5, 0).reshape(x.shape)
        hidden, residual = ops.add_rms_norm(mixed * 1.5, x, self.norm, 1e-5)
        gated = ops.silu_mul(hidden @ self.up.t())
        count = torch.arange(8, dtype=torch.float32, device=x.device)
        return gated + count, residual, ops.greedy(residual)


def layer_inputs():
    angles = torch.rand(4, 2)
    return (
        torch.randn(4, 8),
        torch.randn(5, 2, 4, 8),
        angles.cos(),
        angles.sin(),
        torch.tensor([4, 5, -1, 8], dtype=torch.int32),
        torch.tensor([[1, -1], [2, -1]], dtype=torch.int32),
        torch.tensor([0, 0, -1, 1], dtype=torch.int32),
        torch.tensor([0, 1, 0, 0], dtype=torch.int32),
        torch.zeros(7),
    )


def lower(module, inputs, outputs, folder):
    part = Part(
        "part", module, tuple(f"in{i}" for i in range(len(inputs))), tuple(f"out{i}" for i in range(outputs))
    )
    graph = capture(part, tuple(TensorSpec.of(tensor) for tensor in inputs))
    write_captured(default_passes(torch.device("cpu")).run(graph), folder)
    XlaLowering().lower(folder)
    return HloFacts.read(folder)


def computation(folder):
    return xla_builder.computation_from_module_proto("graph", (folder / "graph.hlo.pb").read_bytes())


def text(folder):
    return xla_builder.get_computation_hlo(computation(folder))


def test_xla_computes_from_the_hlo_what_pytorch_computes_from_the_graph(tmp_path):
    import torch_xla

    torch.manual_seed(0)
    layer, inputs = Layer(), layer_inputs()
    facts = lower(layer, inputs, 3, tmp_path)
    tensors = [*(parameter.detach() for parameter in layer.parameters()), *inputs]
    expected = graph_function(tmp_path)(None, *(tensor.clone() for tensor in tensors))
    assert len(facts.parameters) == len(tensors) - 1  # one input is not read
    device = torch_xla.device()
    arguments = [tensors[index].to(device) for index in facts.parameters]
    results = torch_xla._XLAC._xla_user_computation("xla::graph", arguments, computation(tmp_path))
    assert len(results) == facts.num_outputs == len(expected) == 4
    for result, tensor in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), tensor, atol=2e-5, rtol=2e-5)


def test_a_written_input_is_an_alias_that_xla_understands(tmp_path):
    facts = lower(Layer(), layer_inputs(), 3, tmp_path)
    kv = facts.parameters.index(3 + 1)  # three weights come first
    assert facts.aliases == ((3, kv),)
    assert f"input_output_alias={{ {{3}}: ({kv}, {{}}, may-alias) }}" in text(tmp_path).splitlines()[0]


def test_many_aliases_and_large_numbers_are_encoded(tmp_path):
    class Many(nn.Module):
        def forward(self, x, *state):
            for tensor in state:
                tensor.add_(x)
            return x * 2

    inputs = [torch.zeros(2) for _ in range(201)]
    facts = lower(Many(), inputs, 1, tmp_path)
    header = text(tmp_path).splitlines()[0]
    assert len(facts.aliases) == 200
    assert all(
        f"{{{output}}}: ({parameter}, {{}}, may-alias)" in header for output, parameter in facts.aliases
    )
    assert alias_field(()) == b""


def test_a_state_that_is_overwritten_whole_has_no_alias(tmp_path):
    class Overwrite(nn.Module):
        def forward(self, x, state):
            state.copy_(x * 2)
            return x + 1

    facts = lower(Overwrite(), [torch.zeros(3), torch.zeros(3)], 1, tmp_path)
    assert facts.parameters == (0,) and facts.aliases == () and facts.num_outputs == 2


@pytest.fixture
def two_ranks():
    """Two ranks for tracing: functional collectives are recorded, never run."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield dist.new_group([0, 1]).group_name, dist.new_group([0, 2]).group_name
    dist.destroy_process_group()


class Collectives(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        ops = torch.ops._c10d_functional
        x = ops.wait_tensor(ops.all_reduce(x, "sum", self.group))
        x = ops.wait_tensor(ops.all_gather_into_tensor(x * 2, 2, self.group))
        return ops.wait_tensor(ops.reduce_scatter_tensor(x + 1, "sum", 2, self.group))


def test_collectives_carry_their_ranks_and_their_token_is_a_constant(two_ranks, tmp_path):
    facts = lower(Collectives(two_ranks[0]), [torch.zeros(4, 3)], 1, tmp_path)
    lines = text(tmp_path).splitlines()
    for name in ("all-reduce", "all-gather", "reduce-scatter"):
        (line,) = [line for line in lines if f" {name}(" in line]
        assert "replica_groups={{0,1}}" in line
    assert sorted(facts.parameters) == [-1, 0]
    assert all(value.numel() == 1 and value.item() == 0 for value in facts.constants.values())
    with pytest.raises(CompileError, match=r"over the ranks \[0, 2\]: only consecutive ranks"):
        lower(Collectives(two_ranks[1]), [torch.zeros(4, 3)], 1, tmp_path / "gap")


_library = torch.library.Library("neuronx_test", "DEF")
_library.define("foreign(Tensor x) -> Tensor")
_library.impl("foreign", lambda x: x + 1, "CPU")
_library.impl("foreign", torch.empty_like, "Meta")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.ops.neuronx_test.foreign(x), "neuronx_test.*foreign"),
        (
            lambda x: torch.ops.neuron.packed_linear(x, x.new_zeros(1, 2, 32, 2), 32, False),
            "neuron.packed_linear.default has no static form.*kv_write",
        ),
        (torch.special.bessel_j0, "XLA has no form of .*bessel_j0"),
    ],
)
def test_what_xla_has_no_form_of_is_named(function, words, tmp_path):
    class Call(nn.Module):
        def forward(self, x):
            return function(x)

    with pytest.raises(CompileError, match=words) as caught:
        lower(Call(), [torch.eye(4)], 1, tmp_path)
    assert "part 'part' cannot be lowered to HLO" in str(caught.value)
    assert not (tmp_path / "graph.hlo.pb").exists()


def test_the_version_names_torch_xla_and_the_lowering_is_found():
    import torch_xla

    assert XlaLowering().missing() == ""
    assert XlaLowering().version().startswith(f"torch_xla {torch_xla.__version__}")


def test_the_facts_are_plain_json(tmp_path):
    lower(Layer(), layer_inputs(), 3, tmp_path)
    facts = json.loads((tmp_path / "hlo.json").read_text())
    assert set(facts) == {"torch_xla", "parameters", "constants", "num_outputs", "aliases"}
