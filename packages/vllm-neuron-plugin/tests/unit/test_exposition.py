# SPDX-License-Identifier: Apache-2.0
"""Which directory a process writes its series to: its server's, the user's, or a new one."""

import os
import subprocess
import sys

import pytest

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
PROGRAM = """
import multiprocessing, os, subprocess, sys
from vllm_neuron.exposition import share_metrics

if __name__ != "__main__":
    share_metrics()  # as a spawned child imports the plugin: before multiprocessing has told it of its parent

def tell(queue):
    queue.put(os.environ["PROMETHEUS_MULTIPROC_DIR"])

if __name__ == "__main__":
    share_metrics()
    print(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    child = spawn.Process(target=tell, args=(queue,))
    child.start()
    print(queue.get(timeout=60))
    child.join()
    if len(sys.argv) == 1:
        subprocess.run([sys.executable, __file__, "another"], check=True)
"""


@pytest.fixture
def told(tmp_path):
    """Directories of a program, its child process, a program that it starts, and the child of that."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)

    def run(**variables: str) -> list[str]:
        env = {name: value for name, value in os.environ.items() if name != VARIABLE} | variables
        command = [sys.executable, str(path)]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        return ran.stdout.split()

    return run


def test_a_server_shares_one_directory_and_a_program_it_starts_has_its_own(told):
    first, child, second, child_of_second = told()
    assert first == child
    assert second == child_of_second
    assert first != second
    assert not os.path.exists(first) and not os.path.exists(second)


def test_the_directory_of_the_user_is_everyones(told, tmp_path):
    assert told(**{VARIABLE: str(tmp_path)}) == [str(tmp_path)] * 4
    assert tmp_path.exists()
