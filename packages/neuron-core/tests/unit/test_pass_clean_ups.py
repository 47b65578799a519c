# SPDX-License-Identifier: Apache-2.0
"""Dead code, replica groups, and the manager that runs, times and checks passes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from neuron_core.errors import CompileError, ConfigError
from neuron_core.graphs.capture import ReplicaGroup, capture
from neuron_core.graphs.passes import DeadCode, PassManager, ReplicaGroups, default_passes
from neuron_core.graphs.program import Part, TensorSpec

_library = torch.library.Library("neuron_effects", "FRAGMENT")
_library.define("announce(Tensor x, str group_name) -> ()")
_library.impl("announce", lambda x, group_name: None, "CompositeExplicitAutograd")
_library.define("share(Tensor x, str group_name) -> Tensor")
_library.impl("share", lambda x, group_name: x.clone(), "CompositeExplicitAutograd")

SPEC = TensorSpec.contiguous((4, 8), torch.float32)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def captured(function, count=1):
    return capture(Part("test", Call(function), tuple("xyz"[:count]), ("out",)), (SPEC,) * count)


def called(graph):
    return [node.name for node in graph.module.graph.nodes if node.op == "call_function"]


def test_what_nobody_uses_goes_and_inputs_stay():
    graph = captured(lambda x, y: x + 1, count=2)
    with graph.module.graph.inserting_before(graph.module.graph.output_node()):
        product = graph.module.graph.call_function(torch.ops.aten.mul.Tensor, tuple(graph.placeholders()))
        graph.module.graph.call_function(torch.ops.aten.exp.default, (product,))
    assert called(graph) == ["add", "mul_tensor", "exp_default"]
    graph = PassManager((DeadCode(),)).run(graph)
    assert called(graph) == ["add"] and len(graph.placeholders()) == 2
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    assert torch.equal(graph.module(x, y)[0], x + 1)


def test_what_has_an_effect_stays():
    graph = captured(lambda x: x.clone())
    (x,), add = graph.placeholders(), graph.module.graph.call_function
    with graph.module.graph.inserting_before(graph.module.graph.output_node()):
        doubled = add(torch.ops.aten.mul.Tensor, (x, 2))
        add(torch.ops.neuron_effects.announce.default, (doubled, "everyone"))
        add(torch.ops.aten.add_.Tensor, (x, 1))
        add(torch.ops.aten._assert_async.msg, (x, "no"))
    assert called(DeadCode().run(graph)) == [
        "clone",
        "mul_tensor",
        "announce_default",
        "add__tensor",
        "_assert_async_msg",
    ]


@pytest.fixture
def groups(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield [dist.new_group([0]).group_name for _ in range(3)]
    dist.destroy_process_group()


def test_groups_are_recorded_in_order_of_first_use_with_their_ranks(groups, monkeypatch):
    ops = torch.ops._c10d_functional

    def function(x):
        x = ops.wait_tensor(ops.all_reduce(x, "sum", groups[1]))
        x = ops.wait_tensor(ops.all_gather_into_tensor(x, group_size=1, group_name=groups[0]))
        x = torch.ops.neuron_effects.share(x, group_name=groups[2])
        return ops.wait_tensor(ops.all_reduce(x, "sum", groups[1]))

    graph = captured(function)
    names = (groups[1], groups[0], groups[2])
    assert graph.replica_groups is None and graph.groups() == names
    ranks = {groups[0]: [3, 7], groups[1]: [2, 3, 6, 7], groups[2]: [0]}
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: ranks[group.group_name])
    graph = default_passes(torch.device("cpu")).run(graph)
    assert graph.replica_groups == tuple(ReplicaGroup(name, tuple(ranks[name])) for name in names)
    assert graph.groups() == names


def test_a_graph_without_collectives_has_no_groups():
    graph = PassManager((ReplicaGroups(),)).run(captured(lambda x: x + 1))
    assert graph.replica_groups == () and graph.groups() == ()


def test_a_group_that_does_not_exist_is_named_with_its_node(groups):
    def function(x):
        return torch.ops._c10d_functional.all_reduce(x, "sum", "nobody")

    graph = captured(function)
    with pytest.raises(
        CompileError, match=r"all_reduce \(.*test_pass_clean_ups.py:\d+.*'nobody' does not exist"
    ):
        ReplicaGroups().run(graph)


def test_default_passes_run_in_order_and_each_can_be_left_out():
    names = (
        "device_rewrite",
        "duplicate_inputs",
        "alias_analysis",
        "out_of_place",
        "dead_code",
        "replica_groups",
    )
    assert default_passes(torch.device("cpu")).names == names
    for name in names:
        manager = default_passes(torch.device("cpu"), disabled=(name,))
        graph = manager.run(captured(lambda x: x * 2))
        assert manager.names == tuple(n for n in names if n != name) == tuple(graph.pass_seconds)
    with pytest.raises(ConfigError, match="dead_code"):
        default_passes(torch.device("cpu"), disabled=("dead_cod",))


def test_a_pass_that_breaks_the_graph_is_caught_by_the_manager():
    class Break:
        name = "break"

        def run(self, graph):
            nodes = list(graph.module.graph.nodes)
            nodes[1].append(nodes[0])  # the input after the operator that reads it
            return graph

    with pytest.raises(RuntimeError, match="used before it has been defined"):
        PassManager((Break(),)).run(captured(lambda x: x * 2))


def test_a_pass_of_ones_own_is_run_and_the_module_follows_it():
    class AddToSub:
        name = "add_to_sub"

        def run(self, graph):
            for node in graph.module.graph.nodes:
                if node.target is torch.ops.aten.add.Tensor:
                    node.target = torch.ops.aten.sub.Tensor
            return graph

    graph = PassManager((AddToSub(),)).run(captured(lambda x, y: x + y, count=2))
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    assert torch.equal(graph.module(x, y)[0], x - y) and graph.pass_seconds["add_to_sub"] > 0
