# SPDX-License-Identifier: Apache-2.0
"""A process that has computed on several threads forks, and parent and child go on computing on several."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, torch
from vllm_neuron.forking import give_threads_back_before_fork

torch.set_num_threads(2)
values = torch.arange(4_000_000, dtype=torch.float32)

def computed():
    return int((values + 1).clamp(max=1).sum())

before = computed()
give_threads_back_before_fork()
give_threads_back_before_fork()
pid = os.fork()
if pid == 0:
    os._exit(0 if computed() == before and torch.get_num_threads() == 2 else 1)
_, status = os.waitpid(pid, 0)
print(before, computed(), status)
"""


def test_a_child_computes_after_its_parent_has(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    try:
        ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.fail("the child waits for threads that only its parent has")
    assert ran.stdout.split() == ["4000000", "4000000", "0"], ran.stderr


def test_a_process_without_torch_forks_as_before(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys\n"
        "from vllm_neuron.forking import give_threads_back_before_fork\n"
        "assert 'torch' not in sys.modules\n"
        "give_threads_back_before_fork()\n"
        "pid = os.fork()\n"
        "os._exit(7) if pid == 0 else sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, str(path)], timeout=120).returncode == 7
