# SPDX-License-Identifier: Apache-2.0
"""Run by the cache tests in processes of its own: ``cache_worker.py ROOT LOG SECONDS``."""

import os
import sys
import time
from pathlib import Path

from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.key import GraphKey


def main(root, log, seconds):
    def compile_into(staging):
        (staging / "half.bin").write_bytes(b"half")
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(float(seconds))
        (staging / "artifact.bin").write_bytes(b"artifact" * 1000)
        return {"part": "worker"}

    entry, compiled = CompileCache(Path(root)).get_or_compile(GraphKey.of({"graph": "same"}), compile_into)
    print(compiled, (entry.path / "artifact.bin").stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
