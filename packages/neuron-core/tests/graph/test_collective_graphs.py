# SPDX-License-Identifier: Apache-2.0
"""Functional collectives survive capture, passes, key and both compilers; group names are those of the process."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from neuron_core.errors import CompileError
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.inductor import InductorCompiler
from neuron_core.graphs.key import graph_key, normalised_groups
from neuron_core.graphs.passes import default_passes
from neuron_core.graphs.program import Part, Program, TensorSpec


class Reduce(nn.Module):
    def __init__(self, group_name):
        super().__init__()
        self.group_name = group_name
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        ops = torch.ops._c10d_functional
        x = ops.wait_tensor(ops.all_reduce(self.linear(x), "sum", self.group_name))
        x = ops.wait_tensor(ops.all_gather_into_tensor(x + 1, 1, self.group_name))
        return ops.wait_tensor(ops.reduce_scatter_tensor(x * 2, "sum", 1, self.group_name))


@pytest.fixture
def groups(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield [dist.new_group([0]).group_name for _ in range(2)]
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["fx", "inductor"])
def test_collectives_run_in_both_compilers_and_another_group_shares_the_artifact(
    name, groups, cpu_device, tmp_path, session_toolchain
):
    compiler = FxCompiler() if name == "fx" else InductorCompiler(session_toolchain, num_threads=1)
    x = torch.randn(4, 8)
    for position, group in enumerate(groups):
        torch.manual_seed(0)
        module = Reduce(group)
        program = Program((Part("reduce", module, ("x",), ("y",)),), ("y",))
        builder = GraphBuilder(cpu_device, compiler, CompileCache(tmp_path / "cache"))
        compiled = builder.build(program, {"x": ((4, 8), torch.float32)})
        torch.testing.assert_close(compiled({"x": x})["y"], (module.linear(x) + 1) * 2)
        assert builder.stats.compiled == (position == 0)
    entry = compiled.graphs[0].path
    assert json.loads((entry / "graph.json").read_text())["groups"] == groups[:1]


def test_the_replica_groups_are_in_the_key(groups, monkeypatch):
    graph = capture(
        Part("reduce", Reduce(groups[0]), ("x",), ("y",)), (TensorSpec.contiguous((4, 8), torch.float32),)
    )
    graph = default_passes(torch.device("cpu")).run(graph)
    assert graph.groups() == (groups[0],) and normalised_groups(graph.groups()) == [[0]]
    alone = graph_key(graph, FxCompiler(), ())
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [2, 4])
    assert normalised_groups(graph.groups()) == [[0, 2]]
    assert alone.differences(graph_key(graph, FxCompiler(), ())) == ("replica_groups",)


def test_a_group_that_does_not_exist_is_named(groups):
    with pytest.raises(CompileError, match="'nobody' does not exist"):
        normalised_groups(["nobody"])
