# SPDX-License-Identifier: Apache-2.0
"""Programs with an FP8 cache: compiled as eager, one graph for layers with other scales, no step at any position."""

import pytest
import torch

from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.inductor import InductorCompiler
from neuron_models import build_model, load_weights
from neuron_parallel import ParallelGroups

PROMPTS = [[5, 17, 99, 3, 42], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [100, 0, 1]]
FP8 = torch.float8_e4m3fn


class Device:
    name = "cpu"
    torch_device = torch.device("cpu")


def runner(driver, config, folder, kv_dtype=FP8, **sizes):
    """A runner over a model whose layers have scales of their own."""
    groups = ParallelGroups.single()
    model = build_model(config, dtype=torch.float32, groups=groups, block_size=16, kv_dtype=kv_dtype)
    load_weights(model, folder, groups.tp, 0)
    if kv_dtype == FP8:
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.attn.k_scale.copy_(torch.tensor([0.011, 0.02]) * (1 + i))
            layer.self_attn.attn.v_scale.fill_(0.007 * (1 + i))
    return driver.PagedRunner(model, groups.tp, block_size=16, **sizes)


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_compiled_programs_are_the_eager_ones_and_layers_share_a_graph(driver, tmp_path, compiler):
    config, folder = driver.llama_config(), tmp_path / "model"
    driver.write_checkpoint(config, folder)
    eager, compiled = (runner(driver, config, folder) for _ in range(2))
    cache = CompileCache(tmp_path / "cache")
    backend = FxCompiler() if compiler == "fx" else InductorCompiler(cache.toolchain_dir, 1)
    builder = GraphBuilder(Device(), backend, cache)
    layer_graphs = []

    def execute(bucket, variant, values):
        program = compiled.model.program(bucket, variant)
        specs = {name: (tuple(values[name].shape), values[name].dtype) for name in program.inputs()}
        built = builder.build(program, specs, bucket=bucket.name)
        layer_graphs.append({id(graph) for graph in built.graphs[1:-1]})
        return built(values)

    compiled.execute = execute
    places = [kv.data_ptr() for kv in compiled.kv.values()]
    for step in ("prefill", "decode"):
        given = PROMPTS if step == "prefill" else [1, 2, 3, 4]
        expected, found = getattr(eager, step)(given), getattr(compiled, step)(given)
        torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-4, rtol=1e-4)
    for name, kv in eager.kv.items():
        assert compiled.kv[name].dtype == FP8 and kv.float().any()
        torch.testing.assert_close(compiled.kv[name].float(), kv.float())
    assert places == [kv.data_ptr() for kv in compiled.kv.values()]
    assert [len(graphs) for graphs in layer_graphs] == [1, 1]
    builder.close()


def test_decoding_and_rescoring_agree_at_every_position(driver, tmp_path):
    config, folder = driver.llama_config(max_position_embeddings=256), tmp_path / "model"
    driver.write_checkpoint(config, folder)
    errors = {}
    for kv_dtype in (None, FP8):
        sizes = {"num_seqs": 1, "max_len": 256, "tokens": 256, "kv_dtype": kv_dtype}
        decoding, scoring = (runner(driver, config, folder, **sizes) for _ in range(2))
        out, text = decoding.prefill([[5, 17, 99, 3]]), [5, 17, 99, 3]
        logits = []
        for _ in range(224):
            text.append(int(out["tokens"][0]))
            out = decoding.decode([text[-1]])
            logits.append(out["logits"][0])
        whole = scoring.all_logits(scoring.prefill([text])["hidden_states"])
        errors[kv_dtype] = (whole[4:228] - torch.stack(logits)).abs().amax(dim=1)
    assert errors[None].max() < 1e-4
    assert errors[FP8].max() < 1e-2
    early, late = errors[FP8][:93], errors[FP8][93:]
    assert late.mean() <= 10 * early.mean() + 1e-4
