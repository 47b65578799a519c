# SPDX-License-Identifier: Apache-2.0
"""Graphs compiled without weights are the ones a loaded model finds, on one rank and on two."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "model_compile_worker.py"
BF16 = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 64}


def run(*arguments):
    done = subprocess.run(
        [sys.executable, WORKER, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def checkpoint(driver, tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    driver.write_checkpoint(driver.llama_config(**BF16), root / "whole")
    (root / "config").mkdir()
    shutil.copy(root / "whole" / "config.json", root / "config")
    return root


@pytest.fixture(scope="module")
def tools(driver, tmp_path_factory):
    """Folders of the CPU kernels and of precompiled headers: kept ones, or those that the first compile here made."""
    made = tmp_path_factory.mktemp("tools")
    kept = driver.KEPT / "graphs"
    return {name: kept / name if (kept / name).is_dir() else made / name for name in ("kernels", "toolchain")}


# By default a server does so from a copy of what was compiled: the plugin's test_compile_ahead.py.
@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loaded_model_compiles_nothing_after_a_compile_without_weights(checkpoint, tools, tmp_path, ranks):
    cache = tmp_path / "cache"
    for name, folder in tools.items():
        if folder.is_dir():
            shutil.copytree(folder, cache / name)
    ahead = run("compile", checkpoint / "config", cache, ranks)
    for name, folder in tools.items():
        if not folder.is_dir():
            shutil.copytree(cache / name, folder)
    assert ahead["compiled"] == ahead["distinct"] > 0
    for served in run("serve", checkpoint / "whole", cache, ranks):
        assert served == {"captured": 0, "compiled": 0, "loaded": ahead["distinct"]}


def test_a_model_of_70_billion_parameters_is_captured_in_little_memory(tmp_path):
    facts = run("capture70b", tmp_path)
    assert facts["parameters"] == pytest.approx(70.55e9 / 8, rel=0.05)
    assert facts["peak_bytes"] < 3 << 30
    assert facts["graphs"] >= 5 * facts["buckets"]
