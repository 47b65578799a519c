# SPDX-License-Identifier: Apache-2.0
"""Building and loading the CPU device's kernels: once per machine, compiler and source, into the cache directory."""

from __future__ import annotations

import atexit
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from neuron_core.errors import CompileError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
_LIBRARY = "libneuron_kernels.so"
# Fused products only where the source asks for them would cost speed; the order of sums is fixed in the source.
_FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-std=c++20", "-fPIC"),
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
_COMPILER = "g++"  # the one Inductor uses as well
_loaded: Path | None = None


def load_kernels(directory: Path) -> Path:
    """Load the kernel library kept under ``directory``, building it there first if need be.

    A directory that cannot be written is named in a warning and replaced by one for this process alone. Later
    calls in the same process do nothing. Returns the library's path.

    Raises:
        CompileError: there is no C++ compiler, or it failed; its output is in the message.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    compiler = _COMPILER
    if shutil.which(compiler) is None:
        raise CompileError(
            f"the CPU device builds its kernels with {compiler}, which is not on PATH: install it"
        )
    try:
        library = _built(compiler, Path(directory))
    except OSError as error:
        private = Path(tempfile.mkdtemp(prefix="neuron-kernels-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        log.warning(
            "%s cannot hold the CPU kernels (%s); building them into %s for this process",
            directory,
            error,
            private,
        )
        library = _built(compiler, private)
    loader: Any = torch.ops
    loader.load_library(str(library))
    _loaded = library
    return library


def _built(compiler: str, directory: Path) -> Path:
    entry = directory / "kernels" / _digest(compiler)
    library = entry / _LIBRARY
    if not _is_whole(library):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not _is_whole(library):
                _build(compiler, entry)
    return library


def source_digest() -> str:
    """SHA-256 over the kernel sources and flags, for graph keys."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    cpuinfo = Path("/proc/cpuinfo")
    features = next(
        (line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), ""
    ) if cpuinfo.exists() else ""  # fmt: skip
    parts = (source_digest().encode(), version, features.encode(), torch.__version__.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _is_whole(library: Path) -> bool:
    stamp = library.with_suffix(".sha256")
    if not (library.exists() and stamp.exists()):
        return False
    if hashlib.sha256(library.read_bytes()).hexdigest() == stamp.read_text():
        return True
    log.warning("%s does not match its recorded hash and is built again", library)
    return False


def _build(compiler: str, entry: Path) -> None:
    log.info("building the CPU kernels with %s into %s", compiler, entry)
    staging = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    try:
        sources = sorted(SOURCES.glob("*.cpp"))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda source: _compile(compiler, source, staging), sources))
        libraries = Path(torch.__file__).parent / "lib"
        objects = [str(staging / f"{source.stem}.o") for source in sources]
        library = staging / _LIBRARY
        # libgomp last and by torch's own copy's name: one pool of threads for every kernel of the process.
        _run(
            [
                compiler,
                "-shared",
                *objects,
                "-o",
                str(library),
                f"-L{libraries}",
                "-ltorch_cpu",
                "-lc10",
                "-lgomp",
            ]
        )
        library.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        for built in staging.glob("*.o"):
            built.unlink()
        shutil.rmtree(entry, ignore_errors=True)
        staging.rename(entry)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _compile(compiler: str, source: Path, staging: Path) -> None:
    command = [compiler, *_FLAGS, "-c", str(source), "-o", str(staging / f"{source.stem}.o")]
    if source.name == "bindings.cpp":
        include = Path(torch.__file__).parent / "include"
        command += ["-O1", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    _run(command)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(
            f"{' '.join(command)}\nfailed with status {done.returncode}:\n{done.stderr[-4000:]}"
        )


def pin_threads(cpus: list[int]) -> None:
    """Give the process one compute thread per entry of ``cpus`` and bind each to its processor.

    Binding needs the loaded kernels; without them only the number of threads is set.
    """
    torch.set_num_threads(len(cpus))
    if _loaded is not None:
        torch.ops.neuron.pin_threads(torch.tensor(cpus, dtype=torch.int32))
