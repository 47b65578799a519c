# SPDX-License-Identifier: Apache-2.0
"""Inductor artifacts: right numbers, writes in place, one extension module per graph, nothing baked in."""

import time

import pytest
import torch
from torch import nn

from neuron_core.errors import CacheError, CompileError
from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.inductor import InductorCompiler
from neuron_core.graphs.compilers.wrapper import split_wrapper
from neuron_core.graphs.passes import default_passes
from neuron_core.graphs.program import Part, TensorSpec


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.fixture
def build(tmp_path, session_toolchain):
    def build(function, *inputs, outputs=1):
        names = tuple(f"in{index}" for index in range(len(inputs)))
        part = Part("test", Call(function), names, tuple(f"out{index}" for index in range(outputs)))
        graph = capture(part, tuple(TensorSpec.of(tensor) for tensor in inputs))
        graph = default_passes(torch.device("cpu")).run(graph)
        compiler = InductorCompiler(session_toolchain, num_threads=1)
        compiler.compile(graph, tmp_path)
        return compiler.load(tmp_path)

    return build


def compare(call, function, *inputs):
    ours, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    pointers = [x.data_ptr() for x in ours]
    expected = function(*theirs)
    got = call(list(ours))
    for mine, other in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(mine, other)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    assert [x.data_ptr() for x in ours] == pointers


def attention_like(x, weight, pool, slots):
    rows = torch.nn.functional.linear(x, weight)
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.ops.neuron_test.write_(pool, rows, slots)
    read = torch.ops.neuron_test.read(pool, slots)
    return torch.softmax(read @ rows.t(), -1), read.argmax(-1)


def in_place_mix(x, y):
    x[:, 2:4] += y[:, :2]
    x.t()[0].mul_(2)
    y.index_put_((torch.zeros(2, dtype=torch.long),), x[:2], accumulate=True)
    return x.sum(), y * 2


def swap(x, y):
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return x - y


@pytest.mark.parametrize(
    ("function", "outputs"),
    [(in_place_mix, 2), (lambda x, y: (x, x + y), 2), (lambda x, y: (y, x.t()), 2)],
)
def test_results_and_mutations_equal_eager(build, function, outputs):
    torch.manual_seed(0)
    inputs = torch.randn(4, 6), torch.randn(4, 6)
    compare(build(function, *inputs, outputs=outputs), function, *inputs)


def test_what_inductor_gets_wrong_is_refused(build):
    with pytest.raises(CompileError, match="old value of a mutated input"):
        build(swap, torch.randn(4, 6), torch.randn(4, 6))


def test_a_graph_that_only_passes_inputs_on_needs_no_compiler(build, tmp_path):
    inputs = torch.randn(4, 6), torch.randn(4, 6)
    compare(build(lambda x, y: (y, x), *inputs, outputs=2), lambda x, y: (y, x), *inputs)
    assert not (tmp_path / "kernels.so").exists()


def test_a_pool_is_written_in_place_and_nothing_of_its_size_is_allocated(build):
    torch.manual_seed(0)
    pool = torch.zeros(4096, 16, 8)
    inputs = torch.randn(3, 8), torch.randn(8, 8), pool, torch.tensor([5, 900, 17])
    call = build(attention_like, *inputs, outputs=2)
    compare(call, attention_like, *inputs)
    with torch.profiler.profile(profile_memory=True) as profile:
        call(list(inputs))
    largest = max((event.self_cpu_memory_usage for event in profile.events()), default=0)
    assert 0 < largest < pool.numel() * 4 // 100
    with torch.profiler.profile(profile_memory=True) as profile:
        pool.clone()
    assert max(event.self_cpu_memory_usage for event in profile.events()) >= pool.numel() * 4
    assert pool.count_nonzero(dim=-1).count_nonzero() == 3


def test_another_length_of_the_pool_is_served_by_the_same_artifact(build):
    inputs = torch.randn(3, 8), torch.randn(8, 8), torch.zeros(7, 16, 8), torch.tensor([5, 90, 17])
    call = build(attention_like, *inputs, outputs=2)
    longer = (*inputs[:2], torch.zeros(100, 16, 8), torch.tensor([5, 1590, 17]))
    compare(call, attention_like, *longer)


def test_all_kernels_of_a_graph_are_one_module_and_load_fast(build, tmp_path):
    inputs = torch.randn(3, 8), torch.randn(8, 8), torch.zeros(7, 16, 8), torch.tensor([5, 90, 17])
    build(attention_like, *inputs, outputs=2)
    assert [path.name for path in tmp_path.glob("*.so")] == ["kernels.so"]
    wrapper = (tmp_path / "wrapper.py").read_text()
    assert wrapper.count("cpp_fused") >= 2 and "import" not in wrapper and str(tmp_path) not in wrapper
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        InductorCompiler(tmp_path, num_threads=1).load(tmp_path)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.015


def test_thread_count_is_part_of_the_target(tmp_path):
    one, two = (InductorCompiler(tmp_path, num_threads=count).target() for count in (1, 2))
    assert one != two


def test_a_missing_or_foreign_shared_object_is_a_cache_error(build, tmp_path):
    build(in_place_mix, torch.randn(4, 6), torch.randn(4, 6), outputs=2)
    foreign = tmp_path / "foreign"  # a path of its own, as the dynamic loader remembers paths
    foreign.mkdir()
    for name in ("graph.json", "wrapper.py"):
        (foreign / name).write_bytes((tmp_path / name).read_bytes())
    (foreign / "kernels.so").write_bytes(b"not an object")
    with pytest.raises(CacheError, match=r"kernels\.so"):
        InductorCompiler(tmp_path, num_threads=1).load(foreign)


def test_a_missing_cpp_compiler_is_named(build, monkeypatch):
    monkeypatch.setattr(
        "neuron_core.graphs.compilers.native._command", lambda folder: (["/nonexistent/g++"], [], [])
    )
    with pytest.raises(CompileError, match=r"/nonexistent/g\+\+.*CXX"):
        build(lambda x: x * 3 + 1, torch.randn(4))


@pytest.mark.parametrize(
    ("script", "recordable"),
    [
        ("kill -TERM $$", False),
        ("kill -KILL $$", False),
        ("echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", False),
        ("echo 'kernels.cpp:3:1: error: no' >&2; exit 1", True),
    ],
    ids=["stopped", "killed", "child killed", "refused"],
)
def test_only_what_the_compiler_says_of_the_code_may_be_remembered(
    build, tmp_path, monkeypatch, script, recordable
):
    compiler = tmp_path / "ends-so"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{script}\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(
        "neuron_core.graphs.compilers.native._command", lambda folder: ([str(compiler)], [], [])
    )
    with pytest.raises(CompileError) as caught:
        build(lambda x: x * 3 + 1, torch.randn(4))
    assert caught.value.recordable is recordable


@pytest.mark.parametrize(
    ("generated", "named"),
    [
        ("triton_0 = async_compile.triton('x', '''y''')\nsurprise()\n", "surprise"),
        ("def call(args):\n    return unheard_of(args)\n", "unheard_of"),
        ("def call(args):\n    extern_kernels.unheard(args)\n", "extern_kernels.unheard"),
        ("constant0 = None\ndef call(args):\n    return args\n", "constant0"),
    ],
)
def test_generated_code_the_loader_cannot_serve_is_refused(generated, named):
    with pytest.raises(CompileError, match=named):
        split_wrapper(generated)
