# SPDX-License-Identifier: Apache-2.0
"""Two and four real gloo processes give the logits and tokens of one, in both phases."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).parent / "tensor_parallel_worker.py"
CASES = {
    "tied-odd-vocab": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 104}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(scope="module")
def folders(driver, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for name, (family, changes) in CASES.items():
        driver.write_checkpoint(getattr(driver, f"{family}_config")(**changes), root / name)
    return [root / name for name in CASES]


@pytest.fixture(scope="module")
def single(folders):
    from neuron_parallel import ParallelGroups

    spec = importlib.util.spec_from_file_location("tensor_parallel_worker", WORKER)
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    return {folder.name: worker.run(folder, ParallelGroups.single()) for folder in folders}


# With four ranks the two KV heads of these models are each held by two ranks.
@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, folders, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, WORKER, str(request.param), workdir, *folders]
    subprocess.run(command, check=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return [torch.load(workdir / f"outputs{rank}.pt") for rank in range(request.param)]


@pytest.mark.supports("tensor parallelism", model="llama")
@pytest.mark.supports("tensor parallelism", model="qwen3")
@pytest.mark.parametrize("case", CASES)
def test_every_rank_gives_what_one_rank_gives(single, ranks, case):
    for outputs in ranks:
        assert outputs[case].keys() == single[case].keys()
        for name, expected in single[case].items():
            torch.testing.assert_close(
                outputs[case][name],
                expected,
                atol=1e-4,
                rtol=1e-4,
                msg=lambda text, name=name: f"{name}: {text}",
            )
