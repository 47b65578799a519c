# SPDX-License-Identifier: Apache-2.0
"""Programs are built once per distinct part, start warm without tracing, and equal eager execution."""

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from neuron_core.errors import CompileError
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers import wrapper
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.inductor import InductorCompiler
from neuron_core.graphs.inline import inline
from neuron_core.graphs.program import Part, Program, TensorSpec

WORKER = Path(__file__).with_name("build_worker.py")


@pytest.fixture(scope="module")
def worker():
    spec = importlib.util.spec_from_file_location("graph_build_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_worker(root, compiler, **environ):
    command = [sys.executable, str(WORKER), str(root), compiler]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environ}, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def values_of(specs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in specs.items()}


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, ids):
        return self.table(ids), ids.float() / 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden, pool, slots):
        hidden = hidden + torch.tanh(self.linear(hidden))
        torch.ops.neuron_test.write_(pool, hidden, slots)
        return hidden + torch.ops.neuron_test.read(pool, slots)


class Head(nn.Module):
    def forward(self, hidden, half):
        return hidden.argmax(-1), (hidden * half[:, None]).t()


def model(num_layers=3):
    torch.manual_seed(0)
    layers = [Layer().requires_grad_(False) for _ in range(num_layers)]
    parts = (
        Part("embed", Embed().requires_grad_(False), ("ids",), ("hidden", "half")),
        *(Part(f"layer{i}", x, ("hidden", f"kv.{i}", "slots"), ("hidden",)) for i, x in enumerate(layers)),
        Part("head", Head(), ("hidden", "half"), ("tokens", "logits")),
    )
    return Program(parts, ("tokens", "logits"))


def model_specs(rows=2, blocks=5, num_layers=3):
    pools = {f"kv.{i}": ((blocks, 4, 8), torch.float32) for i in range(num_layers)}
    return {"ids": ((rows,), torch.int64), "slots": ((rows,), torch.int64), **pools}


def model_values(rows=2, blocks=5, num_layers=3):
    pools = {f"kv.{i}": torch.randn(blocks, 4, 8) for i in range(num_layers)}
    return {"ids": torch.arange(rows) + 3, "slots": torch.arange(rows) * 3 + 1, **pools}


def clone(values):
    return {name: tensor.clone() for name, tensor in values.items()}


def compiler_for(name, toolchain):
    return FxCompiler() if name == "fx" else InductorCompiler(toolchain, num_threads=1)


@pytest.mark.parametrize("name", ["fx", "inductor"])
def test_a_program_equals_its_eager_run_and_layers_share_one_graph(
    name, cpu_device, tmp_path, session_toolchain
):
    builder = GraphBuilder(cpu_device, compiler_for(name, session_toolchain), CompileCache(tmp_path))
    progress = []
    compiled = builder.build(
        model(), model_specs(), bucket="decode_b2", on_progress=lambda *report: progress.append(report)
    )
    values = model_values()
    expected_values, pointers = clone(values), {name: t.data_ptr() for name, t in values.items()}
    expected = model().run_eager(expected_values)
    got = compiled(values)
    assert torch.equal(got["tokens"], expected["tokens"])
    for mine, other in (
        (got["logits"], expected["logits"]),
        *zip(values.values(), expected_values.values(), strict=True),
    ):
        if name == "fx":
            assert torch.equal(mine, other)
        torch.testing.assert_close(mine, other)
    assert {name: tensor.data_ptr() for name, tensor in values.items()} == pointers
    stats = builder.stats
    assert (stats.captured, stats.compiled, stats.loaded, stats.shared) == (3, 3, 0, 2)
    assert [report[:3] for report in progress] == [
        (1, 3, "decode_b2 embed"),
        (2, 3, "decode_b2 layer0"),
        (3, 3, "decode_b2 head"),
    ]
    assert stats.seconds.keys() == {"decode_b2"} and stats.seconds["decode_b2"] > 0


def test_the_number_of_blocks_is_not_part_of_the_artifact(cpu_device, tmp_path, session_toolchain):
    compiler = InductorCompiler(session_toolchain, num_threads=1)
    first = GraphBuilder(cpu_device, compiler, CompileCache(tmp_path))
    compiled = first.build(model(), model_specs(blocks=5))
    second = GraphBuilder(cpu_device, compiler, CompileCache(tmp_path))
    second.build(model(), model_specs(blocks=77))
    assert (second.stats.captured, second.stats.compiled, second.stats.loaded) == (0, 0, 3)
    values = model_values(blocks=123)
    expected_values = clone(values)
    expected = model().run_eager(expected_values)
    torch.testing.assert_close(compiled(values)["logits"], expected["logits"])
    torch.testing.assert_close(values["kv.1"], expected_values["kv.1"])


def test_a_part_that_looks_into_the_pool_gets_the_real_number_of_blocks(cpu_device, tmp_path):
    class Sum(nn.Module):
        def forward(self, pool):
            return pool.sum(0) / pool.shape[0]

    program = Program((Part("sum", Sum(), ("kv.0",), ("out",)),), ("out",))
    for expected_captures in (2, 0):
        builder = GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path))
        pool = torch.randn(6, 2)
        got = builder.build(program, {"kv.0": ((6, 2), torch.float32)})({"kv.0": pool})["out"]
        assert torch.equal(got, pool.mean(0)) or torch.allclose(got, pool.mean(0))
        assert builder.stats.captured == expected_captures
    other = GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path))
    pool = torch.randn(7, 2)
    got = other.build(program, {"kv.0": ((7, 2), torch.float32)})({"kv.0": pool})["out"]
    torch.testing.assert_close(got, pool.mean(0))


def test_bound_inputs_need_not_be_passed(cpu_device, tmp_path):
    compiled = GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path)).build(model(), model_specs())
    values = model_values()
    expected = model().run_eager(clone(values))
    compiled.bind({name: tensor for name, tensor in values.items() if name.startswith("kv.")})
    assert compiled.inputs == ("ids", "slots")
    got = compiled({"ids": values["ids"], "slots": values["slots"]})
    assert torch.equal(got["logits"], expected["logits"])
    with pytest.raises(CompileError, match="'weights'"):
        compiled.bind({"weights": torch.ones(1)})
    with pytest.raises(KeyError, match="slots"):
        compiled({"ids": values["ids"]})


def test_a_missing_spec_is_named(cpu_device, tmp_path):
    specs = model_specs()
    del specs["slots"]
    with pytest.raises(CompileError, match=r"decode_b2.*'slots'"):
        GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path)).build(
            model(), specs, bucket="decode_b2"
        )


def test_modules_that_cannot_be_compared_are_captured_each_and_compiled_once(cpu_device, tmp_path):
    program = model()
    for part in program.parts:
        part.module.secret = object()
    builder = GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path))
    builder.build(program, model_specs())
    assert (builder.stats.captured, builder.stats.compiled) == (5, 3)


@pytest.mark.parametrize("name", ["fx", "inductor"])
def test_a_fresh_process_neither_captures_nor_compiles(name, tmp_path, session_toolchain):
    shutil.copytree(session_toolchain, tmp_path / "toolchain")
    cold = run_worker(tmp_path, name)
    assert (cold["captured"], cold["compiled"], cold["loaded"], cold["shared"]) == (1, 1, 0, 2)
    # A compiler that cannot run proves that loading does not need one.
    warm = run_worker(tmp_path, name, CXX="/nonexistent/g++", PATH="/nonexistent")
    assert (warm["captured"], warm["compiled"], warm["loaded"], warm["shared"]) == (0, 0, 1, 2)
    assert warm["sums"] == cold["sums"] and warm["modules"] == [] and warm["invalid"] == 0


def test_an_artifact_that_is_whole_but_does_not_load_is_compiled_again(cpu_device, tmp_path):
    class Grumpy(FxCompiler):
        refusals = 1

        def load(self, entry, groups=()):
            from neuron_core.errors import CacheError

            if self.refusals:
                self.refusals -= 1
                raise CacheError("built for another machine")
            return super().load(entry, groups)

    GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path)).build(model(1), model_specs(num_layers=1))
    cache = CompileCache(tmp_path)
    builder = GraphBuilder(cpu_device, Grumpy(), cache, jobs=1)
    builder.build(model(1), model_specs(num_layers=1))
    assert cache.counters.invalid == 1 and (builder.stats.compiled, builder.stats.loaded) == (1, 2)


def test_a_flipped_bit_in_an_artifact_is_rebuilt(tmp_path):
    run_worker(tmp_path, "fx")
    (file,) = tmp_path.glob("graphs/*/graph.py")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    again = run_worker(tmp_path, "fx")
    assert (again["compiled"], again["invalid"]) == (1, 1)
    assert run_worker(tmp_path, "fx")["loaded"] == 1


def test_a_flat_graph_of_the_whole_program_equals_its_parts(cpu_device, tmp_path):
    builder = GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path / "cache"))
    program = model()
    specs = {name: TensorSpec.contiguous(*spec) for name, spec in model_specs().items()}
    graph = inline(program, specs, builder.capture)
    assert graph.num_outputs == 2 and len(graph.io_map) == 3
    assert graph.weights[:2] == ("embed/table.weight", "layer0/linear.weight")
    (tmp_path / "flat").mkdir()
    FxCompiler().compile(graph, tmp_path / "flat")
    call = FxCompiler().load(tmp_path / "flat")
    values = model_values()
    expected_values = clone(values)
    expected = program.run_eager(expected_values)
    weights = [tensor for part in program.parts for tensor in part.module.parameters()]
    tokens, logits = call([*weights, *(values[name] for name in program.inputs())])
    assert torch.equal(tokens, expected["tokens"]) and torch.equal(logits, expected["logits"])
    assert all(torch.equal(values[name], expected_values[name]) for name in values)


def test_a_changed_module_file_is_captured_again(tmp_path):
    """The request key holds the source of the modules: an edited forward must not find the old graph."""
    source = WORKER.read_text()
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, text in ((first, source), (second, source.replace("torch.tanh", "torch.sin"))):
        folder.mkdir()
        (folder / "build_worker.py").write_text(text)
    outputs = []
    for folder in (first, second, second):
        command = [sys.executable, str(folder / "build_worker.py"), str(tmp_path / "cache"), "fx"]
        outputs.append(
            json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
        )
    assert [output["captured"] for output in outputs] == [1, 1, 0]
    assert outputs[0]["sums"] != outputs[1]["sums"] == outputs[2]["sums"]


def test_under_require_compiled_only_a_warm_cache_serves_and_a_miss_is_named(tmp_path, cpu_device):
    program = Program((Part("head", Head(), ("hidden", "half"), ("tokens", "logits")),), ("tokens",))
    specs = {"hidden": ((3, 8), torch.float32), "half": ((3,), torch.float32)}
    strict = GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path), require_compiled=True)
    with pytest.raises(CompileError, match=r"head.*is not in the compile cache"):
        strict.build(program, specs, bucket="decode_b4")
    GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path)).build(program, specs)
    warm = GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path), require_compiled=True)
    warm.build(program, specs)
    assert (warm.stats.compiled, warm.stats.loaded) == (0, 1)


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def test_a_miss_is_logged_with_the_components_that_differ(tmp_path, cpu_device, caplog):
    caplog.set_level("INFO", "neuron_core.graphs.build")
    specs = {"x": ((2, 4), torch.float32)}
    for factor in (2.0, 3.0):
        program = Program((Part("scale", Scale(factor), ("x",), ("y",)),), ("y",))
        GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path)).build(
            program, specs, bucket="decode_b2"
        )
    first, second = (
        record.getMessage() for record in caplog.records if "compiled decode_b2" in record.getMessage()
    )
    assert first.endswith("the cache had no graph of this part and bucket")
    assert second.endswith("in graph")
    other = {"x": ((3, 4), torch.float32)}
    GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path)).build(program, other, bucket="decode_b2")
    assert caplog.records[-1].getMessage().endswith("in inputs")


class Refusing(FxCompiler):
    """Fails until it is healed."""

    healed = False

    def compile(self, graph, staging):
        if not self.healed:
            raise CompileError(f"{graph.label}: out of patience")
        super().compile(graph, staging)


def test_a_failed_compile_is_remembered_until_a_retry_is_asked_for(tmp_path, cpu_device):
    program = Program((Part("scale", Scale(2.0), ("x",), ("y",)),), ("y",))
    specs = {"x": ((2, 4), torch.float32)}
    compiler = Refusing()
    with pytest.raises(CompileError, match="out of patience"):
        GraphBuilder(cpu_device, compiler, CompileCache(tmp_path)).build(program, specs, bucket="decode_b2")
    compiler.healed = True
    with pytest.raises(CompileError, match="out of patience"):
        GraphBuilder(cpu_device, compiler, CompileCache(tmp_path)).build(program, specs, bucket="decode_b2")
    (failure,) = CompileCache(tmp_path).failures()
    assert (failure.facts["part"], failure.facts["bucket"], failure.facts["compiler"]) == (
        "scale",
        "decode_b2",
        "fx",
    )
    builder = GraphBuilder(cpu_device, compiler, CompileCache(tmp_path), retry_failed=True)
    builder.build(program, specs, bucket="decode_b2")
    assert builder.stats.compiled == 1 and not CompileCache(tmp_path).failures()


def test_what_is_not_compiled_because_it_may_not_be_is_not_remembered_as_a_failure(tmp_path, cpu_device):
    program = Program((Part("scale", Scale(2.0), ("x",), ("y",)),), ("y",))
    specs = {"x": ((2, 4), torch.float32)}
    with pytest.raises(CompileError):
        GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path), require_compiled=True).build(
            program, specs
        )
    assert not CompileCache(tmp_path).failures()
    assert (
        GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path))
        .build(program, specs)
        .graphs[0]
        .compiled
    )


def test_a_builder_that_does_not_load_compiles_for_another_host(tmp_path, cpu_device):
    program = Program((Part("scale", Scale(2.0), ("x",), ("y",)),), ("y",))
    specs = {"x": ((2, 4), torch.float32)}
    ahead = GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path), load=False).build(program, specs)
    with pytest.raises(CompileError, match="load=True"):
        ahead({"x": torch.ones(2, 4)})
    served = GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path), require_compiled=True).build(
        program, specs
    )
    assert torch.equal(served({"x": torch.ones(2, 4)})["y"], torch.full((2, 4), 2.0))


class AddFirst(nn.Module):
    def forward(self, x, y):
        x += 1
        return x * y


def test_a_value_given_twice_to_a_part_is_one_tensor(tmp_path, cpu_device):
    specs = dict.fromkeys("ab", ((3,), torch.float32))
    builder = GraphBuilder(cpu_device, FxCompiler(), CompileCache(tmp_path))
    for inputs in (("a", "b"), ("a", "a")):
        program = Program((Part("add", AddFirst(), inputs, ("y",)),), ("y",))
        values, expected = ({name: torch.ones(3) for name in "ab"} for _ in range(2))
        assert torch.equal(builder.build(program, specs)(values)["y"], program.run_eager(expected)["y"])
    assert builder.stats.captured == 2


def test_compile_threads_build_syntax_trees_one_at_a_time(
    tmp_path, cpu_device, session_toolchain, monkeypatch
):
    """Two at once can fail in Python 3.11, rarely, with a SystemError that has nothing to do with the graph."""
    busy, together, parse = threading.Lock(), [], ast.parse

    def watched(*args, **kwargs):
        free = busy.acquire(blocking=False)
        together.append(not free)
        try:
            time.sleep(0.02)
            return parse(*args, **kwargs)
        finally:
            busy.release() if free else None

    monkeypatch.setattr(wrapper.ast, "parse", watched)
    parts = tuple(Part(f"scale{n}", Scale(float(n)), ("x",), ("x",)) for n in range(2, 6))
    builder = GraphBuilder(cpu_device, InductorCompiler(session_toolchain, 1), CompileCache(tmp_path), jobs=4)
    builder.build(Program(parts, ("x",)), {"x": ((2, 4), torch.float32)})
    assert builder.stats.compiled == 4 and len(together) >= 4 and not any(together)
