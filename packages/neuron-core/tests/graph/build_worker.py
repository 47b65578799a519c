# SPDX-License-Identifier: Apache-2.0
"""Builds the test program in a process of its own and prints what that took: ``build_worker.py ROOT COMPILER``."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.inductor import InductorCompiler
from neuron_core.graphs.program import Part, Program


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, state):
        x = torch.tanh(self.linear(x)) + x
        state.add_(x.sum(0))
        return x


def program(num_layers=3, width=16):
    torch.manual_seed(0)
    layers = [Layer(width).requires_grad_(False) for _ in range(num_layers)]
    return Program(
        tuple(Part(f"layer{i}", layer, ("x", f"state{i}"), ("x",)) for i, layer in enumerate(layers)), ("x",)
    )


def specs(num_layers=3, width=16, rows=2):
    return {
        "x": ((rows, width), torch.float32),
        **{f"state{i}": ((width,), torch.float32) for i in range(num_layers)},
    }


def main(root, compiler_name):
    cache = CompileCache(Path(root))
    compiler = FxCompiler() if compiler_name == "fx" else InductorCompiler(cache.toolchain_dir, num_threads=1)
    device = SimpleNamespace(name="cpu", torch_device=torch.device("cpu"))
    builder = GraphBuilder(device, compiler, cache)
    compiled = builder.build(program(), specs())
    values = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in specs().items()}
    out = compiled(values)["x"]
    modules = [name for name in ("torch._inductor.compile_fx", "torch._dynamo") if name in sys.modules]
    counts = {name: getattr(builder.stats, name) for name in ("captured", "compiled", "loaded", "shared")}
    sums = [float(out.sum()), float(values["state2"].sum())]
    print(json.dumps({**counts, "invalid": cache.counters.invalid, "modules": modules, "sums": sums}))


if __name__ == "__main__":
    main(*sys.argv[1:])
