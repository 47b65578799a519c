# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 with an FP8 cache and calibrated scales predicts a text about as well as with a bfloat16 cache.

The text is Ruth and Jonah, the calibration's Haggai, all of the King James Version (1611, public domain).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("fp8_perplexity_worker.py")


@pytest.mark.supports("FP8 KV cache", model="llama")
@pytest.mark.parametrize("num_tokens", [1024, pytest.param(4096, marks=pytest.mark.nightly)])
def test_perplexity_rises_by_less_than_one_and_a_half_percent(tmp_path, num_tokens):
    command = [sys.executable, str(WORKER), str(tmp_path), str(num_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["num_tokens"] == num_tokens
    for scales in ("layer", "head"):
        assert found[scales] != found["bf16"]
        assert found[scales] / found["bf16"] - 1 < 0.015
