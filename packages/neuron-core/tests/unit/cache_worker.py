# SPDX-License-Identifier: Apache-2.0
"""What the cache tests run in processes of their own.

``start`` forks a real process from a server that has imported the cache already. Results go to files, because a
process that is killed says nothing.
"""

import contextlib
import errno
import fcntl
import json
import logging
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from neuron_core.errors import CacheError, CompileError
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.key import GraphKey

CONTENT = {
    "artifact.bin": random.Random(1).randbytes(20_000),
    "graph.json": b'{"num_inputs": 3}',
    "kernels/code.so": random.Random(2).randbytes(3_000),
}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["neuron_core.graphs.cache", "filelock"])


def key(name="same"):
    return GraphKey.of({"graph": name})


def compile_into(staging, pause=0.0):
    for name, content in CONTENT.items():
        (staging / name).parent.mkdir(exist_ok=True)
        with open(staging / name, "wb") as file:
            for start in range(0, len(content), 1000):
                file.write(content[start : start + 1000])
                file.flush()
                time.sleep(pause)
    return {"part": "worker"}


def read_all(entry):
    return {name: (entry.path / name).read_bytes() for name in CONTENT}


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.005)


def start(action, **arguments):
    """Run ``action(**arguments)`` of this file in a new process."""
    namespace = {"ACTION": action, "ARGUMENTS": arguments}
    process = _context.Process(
        target=runpy.run_path, args=(__file__, namespace, "cache_worker_child"), daemon=True
    )
    process.start()
    return process


def ask_together(folder, count, **arguments):
    """What ``count`` processes say that ask ``folder/cache`` for one key at the same moment."""
    go = folder / "go"
    paths = [folder / f"result{index}" for index in range(count)]
    processes = [
        start("ask", root=folder / "cache", result=path, log=folder / "log", go=go, **arguments)
        for path in paths
    ]
    wait_for(lambda: all(Path(f"{path}.ready").exists() for path in paths))
    go.touch()
    for process in processes:
        process.join(120)
    return [json.loads(path.read_text()) for path in paths]


def kill(process):
    """``kill -9``, and wait until the process is gone."""
    process.kill()
    process.join(60)
    assert not process.is_alive()


def write(path, value):
    temporary = Path(f"{path}.{os.getpid()}")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)


def without_flock():
    """From now on the file system has no ``flock``."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    fcntl.flock = refuse


def ask(root, result, log, pause=0.0, seconds=0.0, go=None, soft=False, fails=False, retry_failed=False):
    """Ask for one key, once ``go`` exists; ``log`` gets a line for every compile."""

    def compile_slowly(staging):
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        facts = compile_into(staging, pause)
        time.sleep(seconds)
        if fails:
            raise CompileError("the compiler found fault")
        return facts

    if soft:
        without_flock()
    if go is not None:
        Path(f"{result}.ready").touch()
        wait_for(Path(go).exists)
    begun = time.monotonic()
    cache = CompileCache(root)
    try:
        entry, compiled = cache.get_or_compile(key(), compile_slowly, retry_failed=retry_failed)
        said = {"compiled": compiled, "right": read_all(entry) == CONTENT}
    except CompileError as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    counters = cache.counters
    said |= {"hits": counters.hits, "misses": counters.misses, "seconds": time.monotonic() - begun}
    write(result, said)


def die_at_event(root, number):
    """Compile, and die before file-system call ``number`` that Python makes meanwhile."""
    seen = 0

    def count(event, _):
        nonlocal seen
        if event.split(".")[0] in ("open", "os", "shutil", "fcntl", "pathlib"):
            seen += 1  # first: os.kill is an event too
            if seen == number + 1:
                os.kill(os.getpid(), signal.SIGKILL)

    cache = CompileCache(root)
    sys.addaudithook(count)
    cache.get_or_compile(key(), compile_into)


def leak_lock(root, ready):
    """Compile while a program that was started meanwhile keeps the lock's descriptor open, and wait."""

    def compile_forever(staging):
        (fd,) = (
            fd for fd in map(int, os.listdir("/proc/self/fd")) if _target(fd).endswith(f"{key().digest}.lock")
        )
        child = subprocess.Popen(["sleep", "600"], pass_fds=[fd])
        write(ready, child.pid)
        time.sleep(600)

    CompileCache(root).get_or_compile(key(), compile_forever)


def _target(fd):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def use(root, names, ready):
    """Load entries as a server does, and live."""
    cache = CompileCache(root)
    found = [cache.lookup(key(name).digest) is not None for name in names]
    write(ready, found)
    time.sleep(600)


def look_once(root, names, result):
    """Look one entry up and read it for a while: what was found stays."""
    cache = CompileCache(root)
    entry = cache.lookup(key(random.choice(names)).digest)
    right = True
    end = time.monotonic() + 0.2
    while entry is not None and time.monotonic() < end:
        right = right and read_all(entry) == CONTENT
    write(result, {"found": entry is not None, "right": right, "invalid": cache.counters.invalid})


def look_unmarked(root, names, stop, result):
    """Look entries up without saying so, until ``stop`` exists: whole or absent, never half."""
    cache = CompileCache(root)
    cache._roots.shared.marks.mark = lambda digest: None
    found = absent = 0
    while not Path(stop).exists():
        if cache.lookup(key(random.choice(names)).digest) is None:
            absent += 1
        else:
            found += 1
    write(result, {"found": found, "absent": absent, "invalid": cache.counters.invalid})


def fill(root, sizes):
    """Compile one entry per size, and end."""
    cache = CompileCache(root)
    for name, size in sizes.items():
        with contextlib.suppress(CacheError):
            cache.get_or_compile(
                key(name), lambda staging, size=size: (staging / "a").write_bytes(b"x" * size) and {}
            )


def read_only(root, result):
    """Use a cache that this process may not write; root becomes another user, whom permissions bind."""
    with tempfile.TemporaryDirectory() as folder:
        CompileCache(folder).get_or_compile(key(), compile_into)  # imports what only root may read
    with open(result, "w") as said:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        json.dump(_use_read_only(root), said)


def _use_read_only(root):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("neuron_core").addHandler(handler)
    cache = CompileCache(root)
    facts = {"warned": any(str(root) in record.getMessage() for record in records)}
    facts["private"] = str(cache.toolchain_dir.parent)
    for what, name in (("old", "same"), ("new", "other")):
        entry, compiled = cache.get_or_compile(key(name), compile_into)
        facts[what] = [compiled, entry.path.is_relative_to(root)]
    for entry in cache.entries():
        cache.verify(entry.digest)
        facts["verified"] = facts.get("verified", 0) + 1
    try:
        cache.prune(max_bytes=0)
    except CacheError as error:
        facts["prune"] = str(error)
    return facts | {"would evict": len(cache.prune(max_bytes=0, dry_run=True).evicted)}


if __name__ == "cache_worker_child":
    globals()[ACTION](**ARGUMENTS)  # noqa: F821
