# SPDX-License-Identifier: Apache-2.0
"""``neuron_core.graphs.compile``: any module as a cached artifact."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from neuron_core.errors import CompileError, ConfigError, NotCompiledError
from neuron_core.graphs import compile as compile_graph

SCRIPT = """
import sys
import torch
from neuron_core.graphs import compile

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
compiled = compile(module, [torch.randn(3, 8)], cache_dir=sys.argv[1])
x = torch.ones(3, 8)
assert torch.allclose(compiled(x), module(x), atol=1e-6)
print(compiled.from_cache, compiled.key.digest)
"""


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x, total):
        total += x.sum(0)
        return x * self.scale, x - 1


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_second_process_loads_what_the_first_compiled(tmp_path):
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=os.environ,
        )
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.split())
    assert [line[0] for line in lines] == ["False", "True"]
    assert lines[0][1] == lines[1][1]


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_outputs_and_mutated_inputs_equal_eager_ones(tmp_path, compiler):
    module = TwoOutputs()
    x, total = torch.randn(3, 4), torch.randn(4)
    expected_total = total.clone()
    expected = module(x, expected_total)
    compiled = compile_graph(module, [x, total], compiler=compiler, cache_dir=tmp_path)
    outputs = compiled(x, total)
    assert all(torch.allclose(a, b) for a, b in zip(outputs, expected, strict=True))
    assert torch.allclose(total, expected_total)
    with torch.no_grad():
        module.scale.fill_(3.0)
    assert torch.allclose(compiled(x, total)[0], x * 3.0)


def test_an_input_of_another_shape_dtype_or_stride_is_named(tmp_path):
    compiled = compile_graph(nn.ReLU(), [torch.randn(2, 4)], compiler="fx", cache_dir=tmp_path)
    for wrong in (torch.randn(3, 4), torch.randn(2, 4).double(), torch.randn(4, 2).T):
        with pytest.raises(CompileError, match="input 0 is"):
            compiled(wrong)
    with pytest.raises(CompileError, match="1 inputs, called with 2"):
        compiled(torch.randn(2, 4), torch.randn(2, 4))


def test_what_cannot_be_compiled_is_named(tmp_path):
    with pytest.raises(CompileError, match=r"'Branch'.*test_compile_api.py.*x\.sum\(\) > 0"):
        compile_graph(Branch(), [torch.randn(2)], compiler="fx", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="inductor"):
        compile_graph(nn.ReLU(), [torch.randn(2)], compiler="indctor", cache_dir=tmp_path)
    with pytest.raises(NotCompiledError, match="'gate' is not in the compile cache"):
        compile_graph(
            nn.ReLU(), [torch.randn(2)], compiler="fx", cache_dir=tmp_path, name="gate", require_compiled=True
        )


class AddInto(nn.Module):
    def forward(self, x, y):
        x += 1
        return x * y


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_one_tensor_given_twice_is_one_tensor(tmp_path, compiler):
    x = torch.randn(3)
    compiled = compile_graph(AddInto(), [x, x], compiler=compiler, cache_dir=tmp_path)
    given = torch.randn(3)
    expected = given.clone()
    product = AddInto()(expected, expected)
    assert torch.equal(compiled(given, given), product) and torch.equal(given, expected)
    with pytest.raises(CompileError, match="share memory in another way"):
        compiled(given, given.clone())
    apart = compile_graph(AddInto(), [x, x.clone()], compiler=compiler, cache_dir=tmp_path)
    assert apart.key != compiled.key
    with pytest.raises(CompileError, match="share memory in another way"):
        apart(given, given)


def test_a_written_input_that_overlaps_another_is_refused(tmp_path):
    whole = torch.randn(6)
    with pytest.raises(CompileError, match="input"):
        compile_graph(AddInto(), [whole[:4], whole[2:]], compiler="fx", cache_dir=tmp_path)
