# SPDX-License-Identifier: Apache-2.0
"""A server that was killed while it compiled leaves whole entries, and the next one starts from them."""

from __future__ import annotations

import shutil
import time

import pytest

COMPILING_TIMEOUT_S = 400.0


# By default `test_cache_inductor.py` kills a process that compiles, without vLLM around it.
@pytest.mark.nightly
def test_a_start_after_kill_9_during_compile_works(start_server, graph_cache, tmp_path):
    cache, log = tmp_path / "cache", tmp_path / "serve.log"
    if (graph_cache / "kernels").is_dir():  # the kernels are not what is compiled here
        shutil.copytree(graph_cache / "kernels", cache / "kernels")
    killed = start_server(cache, log)
    deadline = time.monotonic() + COMPILING_TIMEOUT_S
    while not any(
        p.is_dir() and not p.name.startswith(("probe", "trash")) for p in (cache / "staging").glob("*")
    ):
        assert killed.process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)
    killed.kill()
    left = {
        folder: [sorted(p.name for p in entry.glob("*")) for entry in (cache / folder).glob("*")]
        for folder in ("graphs", "staging")
    }
    # What the kill left: whole entries only, and one that never became an entry.
    assert left["staging"]
    assert all("COMPLETE" in files and "manifest.json" in files for files in left["graphs"])

    again = start_server(cache, log)
    again.wait_until_ready()
    assert again.metric("vllm_neuron:graphs_compiled_total") > 0
    again.stop()
