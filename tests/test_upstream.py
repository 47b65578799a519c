# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests, as `nox -s upstream` runs them: a slice of them always, all of them nightly."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAST_S = 540
"""On a machine that has other things to do; alone it is a fraction of that."""


def upstream(*words: str, timeout_s: int | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "upstream", *words]
    return subprocess.run(command, cwd=ROOT / "tools", capture_output=True, text=True, timeout=timeout_s)


def test_the_fast_slice_of_vllms_own_tests_does_what_is_expected(tmp_path):
    ran = upstream("--fast", "--out", str(tmp_path), timeout_s=FAST_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_vllms_own_tests_do_what_is_expected(tmp_path):
    ran = upstream("--out", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
