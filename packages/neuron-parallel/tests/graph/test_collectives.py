# SPDX-License-Identifier: Apache-2.0
"""Real gloo processes compute what one process computes from the whole weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_compute_what_one_process_computes(world, tmp_path):
    worker = Path(__file__).parent / "collectives_worker.py"
    command = [sys.executable, worker, str(world), tmp_path / "rendezvous"]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
