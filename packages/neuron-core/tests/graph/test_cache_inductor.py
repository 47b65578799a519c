# SPDX-License-Identifier: Apache-2.0
"""The promises of the cache, kept for what the real compiler writes."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from neuron_core.errors import CacheError
from neuron_core.graphs.cache import CompileCache

WORKER = Path(__file__).with_name("build_worker.py")


def start(root):
    command = [sys.executable, str(WORKER), str(root), "inductor"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(output)


def test_a_killed_compile_a_race_and_a_damaged_kernel(tmp_path, session_toolchain):
    root = tmp_path / "cache"
    shutil.copytree(session_toolchain, root / "toolchain")
    killed = start(root)
    end = time.monotonic() + 120
    while not list((root / "staging").glob("*/kernels.cpp")):
        assert time.monotonic() < end and killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert list(CompileCache(root).entries()) == []

    said = [result(process) for process in [start(root), start(root)]]
    assert sorted((one["compiled"], one["loaded"]) for one in said) == [(0, 1), (1, 0)]
    assert said[0]["sums"] == said[1]["sums"] and list((root / "staging").iterdir()) == []

    cache = CompileCache(root)
    (entry,) = cache.entries()
    file = entry.path / "kernels.so"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CacheError, match=r"kernels\.so"):
        cache.verify(entry.digest)
    again = result(start(root))
    assert (again["compiled"], again["invalid"], again["sums"]) == (1, 1, said[0]["sums"])
