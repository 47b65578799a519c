# SPDX-License-Identifier: Apache-2.0
"""The examples in the packages' own READMEs run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    path.parent.name: re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    for path in sorted((ROOT / "packages").glob("*/README.md"))
}


@pytest.mark.parametrize("package", [name for name, blocks in EXAMPLES.items() if blocks])
def test_the_example_runs(package, tmp_path):
    env = {**os.environ, "VLLM_NEURON_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    code = "\n".join(EXAMPLES[package])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_three_libraries_have_an_example():
    assert {"neuron-core", "neuron-parallel", "neuron-models"} <= {
        name for name, found in EXAMPLES.items() if found
    }
