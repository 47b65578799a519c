# SPDX-License-Identifier: Apache-2.0
"""Taps: compiled graphs that also give what passes through modules inside them, and take it from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from neuron_core.devices.cpu import CpuDevice
from neuron_core.errors import CompileError
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.inductor import InductorCompiler
from neuron_core.graphs.program import Part, Program
from neuron_core.graphs.taps import Tap, Taps


class Norm(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total / total.square().mean(-1, keepdim=True).sqrt(), total


class Layer(nn.Module):
    """Calls ``proj`` twice, and returns a view of what ``norm`` gave."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.proj = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, residual: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.norm(hidden, residual)
        kv[0, :8] = x[0]
        return self.proj(torch.relu(self.proj(x))), residual[:]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def program(self) -> Program:
        parts = tuple(
            Part(f"layer.{i}", layer, ("hidden", "residual", f"kv.{i}"), ("hidden", "residual"))
            for i, layer in enumerate(self.layers)
        )
        return Program(parts, ("hidden",))


SPECS = {
    "hidden": ((4, 8), torch.float32),
    "residual": ((4, 8), torch.float32),
    **{f"kv.{i}": ((5, 8), torch.float32) for i in range(3)},
}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(3)
    return Model().requires_grad_(False)


@pytest.fixture
def builder(tmp_path: Path) -> GraphBuilder:
    return GraphBuilder(CpuDevice(), FxCompiler(), CompileCache(tmp_path))


def values(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in SPECS.items()}


def heard_eagerly(model: Model) -> dict[str, Tensor]:
    """What hooks of torch hear of an eager run, by the name of the tap's value."""
    heard: dict[str, Tensor] = {}
    calls: dict[str, int] = {}

    def listen(name: str) -> object:
        def hook(_: nn.Module, args: tuple[Tensor, ...], result: object) -> None:
            call = calls.get(name, 0)
            calls[name] = call + 1
            again = f"@{call}" if call else ""
            for i, tensor in enumerate(args):
                heard[f"tap.{name}:input.{i}{again}"] = tensor.clone()
            for i, tensor in enumerate(result if isinstance(result, tuple) else (result,)):
                heard[f"tap.{name}:output.{i}{again}"] = tensor.clone()

        return hook

    handles = [module.register_forward_hook(listen(name)) for name, module in model.named_modules() if name]
    model.program().run_eager(values())
    for handle in handles:
        handle.remove()
    return heard


@pytest.mark.parametrize("name", ["fx", "inductor"])
def test_taps_give_what_an_eager_run_gives_and_change_nothing(name, model, tmp_path, session_toolchain):
    compiler = FxCompiler() if name == "fx" else InductorCompiler(session_toolchain, num_threads=1)
    builder = GraphBuilder(CpuDevice(), compiler, CompileCache(tmp_path))
    plain = builder.build(model.program(), SPECS)(values())
    tapped = Taps(model, lambda module, tensor: True).apply(model.program(), SPECS)
    outputs = builder.build(tapped.program, SPECS)(values())
    assert torch.equal(outputs["hidden"], plain["hidden"])
    expected = heard_eagerly(model)
    # The cache of a layer is no tensor of a step.
    expected = {name: tensor for name, tensor in expected.items() if tensor.shape != (5, 8)}
    assert set(outputs) == {"hidden", *expected}
    assert {tap.value for tap in tapped.taps} == set(expected)
    tolerance = 0 if name == "fx" else 1e-5
    for value, tensor in expected.items():
        torch.testing.assert_close(outputs[value], tensor, rtol=tolerance, atol=tolerance)


def test_equal_layers_share_their_tapped_graph(model, builder):
    taps = Taps(model, lambda module, tensor: module.endswith("proj") and tensor == "output.0@1")
    builder.build(taps.apply(model.program(), SPECS).program, SPECS)
    assert (builder.stats.compiled, builder.stats.shared) == (1, 2)
    only_one = Taps(model, lambda module, tensor: (module, tensor) == ("layers.1.norm", "output.0"))
    tapped = only_one.apply(model.program(), SPECS)
    assert tapped.taps == (Tap("layers.1.norm", "output.0"),)
    builder.build(tapped.program, SPECS)
    assert builder.stats.compiled == 3, "one for the layer that is tapped, one for the two that are not"


def test_without_a_tap_the_program_is_the_same(model):
    program = model.program()
    assert Taps(model, lambda module, tensor: False).apply(program, SPECS).program == program


def test_a_put_takes_the_place_of_rows(model, builder):
    put = Tap("layers.1.norm", "output.1")
    taps = Taps(
        model,
        lambda module, tensor: module in ("layers.1.norm", "layers.2.norm") and tensor == "output.1",
        puts=lambda module, tensor: Tap(module, tensor) == put,
    )
    tapped = taps.apply(model.program(), SPECS)
    assert set(tapped.put_specs) == {put.put, put.put_rows}
    compiled = builder.build(tapped.program, {**SPECS, **tapped.put_specs})
    untouched = compiled({**values(), **tapped.nothing_put()})
    plain = builder.build(model.program(), SPECS)(values())
    torch.testing.assert_close(untouched["hidden"], plain["hidden"])

    replacement, rows = torch.randn(4, 8), torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    given = compiled({**values(), put.put: replacement, put.put_rows: rows})
    seen = given[put.value]
    assert torch.equal(seen[1::2], replacement[1::2])
    assert torch.equal(seen[::2], untouched[put.value][::2])
    later = Tap("layers.2.norm", "output.1").value
    changed = (given[later] - untouched[later]).abs().amax(dim=1) > 0
    assert changed.tolist() == [False, True, False, True]


def test_an_input_cannot_be_put(model):
    taps = Taps(model, lambda module, tensor: False, puts=lambda module, tensor: tensor == "input.0")
    with pytest.raises(CompileError, match="an input cannot be put; put the output it comes from"):
        taps.apply(model.program(), SPECS)


class Shared(nn.Module):
    """One of two modules that call the same one, and write into what it gave."""

    def __init__(self, proj: nn.Linear) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        y.add_(1)
        return self.proj(y) if y.shape[0] == 4 else y


@pytest.mark.parametrize("name", ["fx", "inductor"])
def test_what_is_written_into_an_output_later_is_not_captured(name, tmp_path, session_toolchain):
    proj = nn.Linear(8, 8).requires_grad_(False)
    compiler = FxCompiler() if name == "fx" else InductorCompiler(session_toolchain, num_threads=1)
    builder = GraphBuilder(CpuDevice(), compiler, CompileCache(tmp_path))
    root = Shared(proj)
    program = Program((Part("only", root, ("x",), ("y",)),), ("y",))
    specs = {"x": ((3, 8), torch.float32)}
    tapped = Taps(root, lambda module, tensor: module == "proj").apply(program, specs)
    x = torch.randn(3, 8)
    outputs = builder.build(tapped.program, specs)({"x": x.clone()})
    torch.testing.assert_close(outputs["tap.proj:output.0"], proj(x))
    torch.testing.assert_close(outputs["y"], proj(x) + 1)


def test_calls_of_a_module_are_numbered_over_all_parts(builder):
    """It runs twice in each of two parts: neither capture overwrites, nor a put reaches, another call."""
    torch.manual_seed(0)
    root = nn.Module()
    root.proj = proj = nn.Linear(8, 8).requires_grad_(False)
    parts = tuple(
        Part(f"part.{i}", Shared(proj), (given,), (out,)) for i, (given, out) in enumerate(["xy", "yz"])
    )
    program = Program(parts, ("z",))
    specs = {"x": ((4, 8), torch.float32)}
    put = Tap("proj", "output.0@2")
    taps = Taps(
        root,
        lambda module, tensor: module == "proj" and tensor.startswith("output"),
        puts=lambda module, tensor: Tap(module, tensor) == put,
    )
    tapped = taps.apply(program, specs)
    assert [tap.tensor for tap in tapped.taps] == ["output.0", "output.0@1", "output.0@2", "output.0@3"]
    x = torch.randn(4, 8)
    compiled = builder.build(tapped.program, {**specs, **tapped.put_specs})
    expected = [proj(x)]
    for _ in range(3):
        given = expected[-1] + 1 if len(expected) % 2 else expected[-1]
        expected.append(proj(given))
    outputs = compiled({"x": x, **tapped.nothing_put()})
    for tap, tensor in zip(tapped.taps, expected, strict=True):
        assert torch.equal(outputs[tap.value], tensor), tap
    replaced = compiled({"x": x, put.put: torch.zeros(4, 8), put.put_rows: torch.ones(4, dtype=torch.int32)})
    for tap, tensor in zip(tapped.taps[:2], expected[:2], strict=True):
        assert torch.equal(replaced[tap.value], tensor), tap
    assert torch.equal(replaced[put.value], torch.zeros(4, 8))
    assert torch.equal(replaced[tapped.taps[3].value], proj(torch.ones(4, 8)))


def test_a_module_of_the_part_alone_is_named_after_it(model):
    class Head(nn.Module):
        def __init__(self, layer: Layer) -> None:
            super().__init__()
            self.layer = layer
            self.own = nn.Identity()

        def forward(self, hidden: Tensor, residual: Tensor, kv: Tensor) -> Tensor:
            return self.own(self.layer(hidden, residual, kv)[0])

    program = Program(
        (Part("head", Head(model.layers[0]), ("hidden", "residual", "kv.0"), ("out",)),), ("out",)
    )
    taps = Taps(model, lambda module, tensor: tensor == "output.0").apply(program, SPECS).taps
    assert {tap.module for tap in taps} == {"layers.0.norm", "layers.0.proj", "layers.0", "head.own", "head"}
