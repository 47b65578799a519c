# SPDX-License-Identifier: Apache-2.0
"""Editing one op changes the keys of the graphs that call it and of no others."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import neuron_core
from neuron_core.errors import CompileError
from neuron_core.ops.sources import FOLDER, OpSources, op_digest

WORKER = Path(__file__).with_name("op_keys_worker.py")
OPS = (
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "silu_mul",
    "packed_linear",
    "kv_write_",
    "kv_write",
    "paged_attention",
    "encoder_attention",
    "greedy",
    "sample",
    "sample_edited",
    "count_tokens_",
    "count_tokens",
)
NORMS = {"rms_norm", "add_rms_norm"}
EDITS = [
    # file, text found in it, its replacement, the ops that are made of it
    ("reference.py", "torch.rsqrt(wide", "1.0 * torch.rsqrt(wide", NORMS),
    ("reference.py", "(F.silu(gate) * up)", "(up * F.silu(gate))", {"silu_mul"}),
    (
        "reference.py",
        "return logits.argmax(-1)",
        "return (+logits).argmax(-1)",
        {"greedy", "sample", "sample_edited"},
    ),
    (
        "reference.py",
        "(rows >= 0).to(counts.dtype)",
        "(rows > -1).to(counts.dtype)",
        {"count_tokens_", "count_tokens"},
    ),
    ("cpu/sampling.cpp", "edits.bans_stop[row]", "0 != edits.bans_stop[row]", {"sample_edited"}),
    ("library.py", "gate_up.shape[1] // 2", "gate_up.shape[1] // 1 // 2", {"silu_mul"}),
    (
        "library.py",
        "return weight.permute(0, 2, 1, 3)",
        "return (+weight).permute(0, 2, 1, 3)",
        {"packed_linear"},
    ),
    ("cpu/linear.cpp", "k < inner; k += 2", "inner > k; k += 2", {"packed_linear"}),
    ("cpu/elementwise.cpp", "float sigmoid(", "float sigmoid (int, ", {"silu_mul"}),
    (
        "cpu/bindings.cpp",
        "query.sizes(), query.options()",
        "query.sizes(), (query.options())",
        {"paged_attention", "encoder_attention"},
    ),
    ("cpu/encoder_attention.cpp", "/ sums[r]", "/ (sums[r])", {"encoder_attention"}),
    ("cpu/linear_f32.cpp", "kGroup = 4", "kGroup = 2", {"packed_linear"}),
    ("cpu/tile_f32.h", "first * value", "value * first", {"encoder_attention", "packed_linear"}),
    (
        "cpu/kernels.h",
        "x < -87.0f ? 0.0f",
        "x < -88.0f ? 0.0f",
        {"paged_attention", "encoder_attention", "sample", "sample_edited", "silu_mul"},
    ),
]


@pytest.fixture
def copied(tmp_path):
    folder = tmp_path / "ops"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def edit(folder, file, old, new):
    path = folder / file
    text = path.read_text()
    assert old in text, f"{file} no longer holds {old!r}"
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(("file", "old", "new", "changed"), EDITS, ids=[f"{e[0]}:{e[1]}" for e in EDITS])
def test_an_edit_changes_the_digests_of_the_ops_made_of_it(copied, file, old, new, changed):
    before = {name: OpSources.read(copied).digest(name) for name in OPS}
    edit(copied, file, old, new)
    after = {name: OpSources.read(copied).digest(name) for name in OPS}
    assert {name for name in OPS if before[name] != after[name]} == changed


def test_comments_and_docstrings_do_not_count(copied):
    before = {name: OpSources.read(copied).digest(name) for name in OPS}
    edit(
        copied,
        "cpu/linear.cpp",
        "template <int Rows, typename Out>",
        "// A tile.\ntemplate <int Rows, typename Out>",
    )
    edit(copied, "reference.py", '"""Index of the largest', '"""The index of the largest')
    assert {name: OpSources.read(copied).digest(name) for name in OPS} == before


def test_a_new_overload_and_a_branch_of_the_preprocessor_count(copied):
    before = OpSources.read(copied).digest("packed_linear")
    edit(copied, "cpu/linear.cpp", "#if defined(__AVX512BF16__)", "#if defined(__AVX512BF16__) && 1")
    assert OpSources.read(copied).digest("packed_linear") != before


def test_every_op_is_listed_and_an_unknown_one_is_named():
    import torch

    ours = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("neuron::")
    }
    defined = {name for name in ours if name not in ("has_packed_linear", "pin_threads")}
    assert defined == set(OPS)
    with pytest.raises(CompileError, match="neuron::frobnicate"):
        op_digest("neuron::frobnicate")


def keys(root):
    environ = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, str(WORKER)], capture_output=True, text=True, env=environ, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(str(root))
    return json.loads(done.stdout)


def test_one_changed_line_changes_the_keys_of_the_graphs_that_call_the_op_and_of_no_others(tmp_path):
    package = tmp_path / "neuron_core"
    shutil.copytree(Path(neuron_core.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = keys(tmp_path)
    edit(package / "ops", "reference.py", "torch.rsqrt(wide", "1.0 * torch.rsqrt(wide")
    after = keys(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"Norm", "Both"}
