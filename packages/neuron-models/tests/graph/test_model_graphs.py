# SPDX-License-Identifier: Apache-2.0
"""Programs as graphs: equal layers share one, it computes what eager does, capture needs no peer."""

import pytest
import torch

from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.program import TensorSpec
from neuron_core.graphs.signature import structural_signature
from neuron_models import build_model
from neuron_parallel import ParallelGroups, ParallelPlan

PROMPTS = [[5, 17, 99, 3, 42], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [100, 0, 1]]


class Device:
    name = "cpu"
    torch_device = torch.device("cpu")


@pytest.fixture
def builder(tmp_path):
    builder = GraphBuilder(Device(), FxCompiler(), CompileCache(tmp_path / "cache"))
    yield builder
    builder.close()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_programs_give_the_eager_logits_and_layers_share_a_graph(driver, tmp_path, builder, family):
    driver.write_checkpoint(getattr(driver, f"{family}_config")(tie_word_embeddings=True), tmp_path / "model")
    eager, compiled = (driver.PagedRunner.load(tmp_path / "model") for _ in range(2))
    graphs = {}

    def execute(bucket, variant, values):
        program = compiled.model.program(bucket, variant)
        specs = {name: (tuple(values[name].shape), values[name].dtype) for name in program.inputs()}
        built = builder.build(program, specs, bucket=bucket.name)
        graphs[bucket.name] = [id(graph) for graph in built.graphs]
        return built(values)

    compiled.execute = execute
    expected, found = eager.prefill(PROMPTS), compiled.prefill(PROMPTS)
    for name in ("tokens", "logits", "hidden_states"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)
    for name, kv in eager.kv.items():
        torch.testing.assert_close(compiled.kv[name], kv, atol=1e-5, rtol=1e-5)
    expected, found = eager.decode([1, 2, 3, 4]), compiled.decode([1, 2, 3, 4])
    torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-5, rtol=1e-5)
    for ids in graphs.values():
        embed, *layers, head = ids
        assert len(set(layers)) == 1 and len({embed, layers[0], head}) == 3


def test_all_ranks_of_a_plan_capture_the_same_graphs_without_a_peer(driver):
    groups = ParallelGroups.describe(ParallelPlan(2))
    config = driver.llama_config(vocab_size=104)
    with torch.device("meta"):
        model = build_model(config, dtype=torch.float32, groups=groups, block_size=4)
    runner = driver.PagedRunner(model, groups.tp)
    captured = []

    def execute(bucket, variant, values):
        program = model.program(bucket, variant)
        specs = {name: TensorSpec.of(values[name]) for name in program.inputs()}
        for part in program.parts:
            graph = capture(part, tuple(specs[name] for name in part.inputs), bucket=bucket.name)
            specs |= dict(zip(part.outputs, graph.output_specs(), strict=True))
            captured.append((part.name, graph.groups()))

    runner.execute = execute
    runner.prefill(PROMPTS, "greedy")
    runner.decode([1, 2, 3, 4], "sample")
    assert {names for _, names in captured} == {("neuron.tp",)}
    signatures = {structural_signature(layer) for layer in model.model.layers}
    assert len(signatures) == 1 and None not in signatures
