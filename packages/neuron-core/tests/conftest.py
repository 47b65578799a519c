# SPDX-License-Identifier: Apache-2.0
"""Custom operators and devices the graph tests share."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from neuron_core import ops
from neuron_core.graphs.key import register_op_sources

# Needs torch_xla, which no torch of this workspace has: `nox -s lowering` makes an environment for it.
collect_ignore = [] if find_spec("torch_xla") else ["lowering"]

_library = torch.library.Library("neuron_test", "FRAGMENT")


def _write_(pool, rows, slots):
    pool.view(-1, pool.shape[-1]).index_copy_(0, slots.long(), rows)


def _write(pool, rows, slots):
    pool = pool.clone()
    _write_(pool, rows, slots)
    return pool


def _read(pool, slots):
    return pool.view(-1, pool.shape[-1])[slots.long()].clone()


def _register(schema, cpu, meta):
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, cpu, "CPU")
    _library.impl(name, meta, "Meta")


_register("write_(Tensor(a!) pool, Tensor rows, Tensor slots) -> ()", _write_, lambda pool, rows, slots: None)
_register(
    "write(Tensor pool, Tensor rows, Tensor slots) -> Tensor",
    _write,
    lambda pool, rows, slots: torch.empty_like(pool),
)
_register(
    "read(Tensor pool, Tensor slots) -> Tensor",
    _read,
    lambda pool, slots: pool.new_empty(slots.shape[0], pool.shape[-1]),
)
_register("lonely_(Tensor(a!) pool) -> ()", lambda pool: pool.zero_() and None, lambda pool: None)
register_op_sources("neuron_test", lambda name: "1")


@pytest.fixture
def cpu_device():
    return SimpleNamespace(name="cpu", torch_device=torch.device("cpu"))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """The library of CPU kernels, built and loaded once."""
    return ops.load_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def packing(kernels):
    """Skips where the processor has no product of packed weights."""
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs a processor with AVX512-BF16")


@pytest.fixture(scope="session")
def session_toolchain(tmp_path_factory):
    """One precompiled header for every test that compiles."""
    return tmp_path_factory.mktemp("toolchain")
