# SPDX-License-Identifier: Apache-2.0
"""A folder of pinned wheels, filled by pip and checked by hash.

A file enters the folder by a rename after its hash was checked, so an interrupted run leaves only whole files
and the next run goes on with what is missing. The stamp is written last and remembers size and modification
time of every file, so that an unchanged wheelhouse is known to be good without being read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from . import places
from .console import Failure, Step, megabytes, tail
from .pins import Pin

STAMP = ".complete"
WORKERS = 4
BATCH_FILES = 12
ALONE_BYTES = 20_000_000
"""A file larger than this gets a pip of its own."""

CPU_TORCH_HELP = """\
pip found no CPU build of torch ({file}).
Its version ends in `+cpu`; the one without is the CUDA build, which is never downloaded here.
Tell pip where it is, with one of
    PIP_EXTRA_INDEX_URL   the address of the CPU wheel index that the installation page of PyTorch names
    PIP_FIND_LINKS        a folder or page that holds {file}
or for good with `pip config set global.extra-index-url ADDRESS` or `pip config set global.find-links FOLDER`,
and run the same command again."""


def is_complete(directory: Path, pins: Sequence[Pin]) -> bool:
    """Whether every pinned file is there, unchanged since its hash was last checked."""
    stamp = places.read_json(directory / STAMP)
    states = [(stamp.get(pin.file), _state(directory / pin.file)) for pin in pins]
    return all(known is not None and known == found for known, found in states)


def fill(
    directory: Path,
    pins: Sequence[Pin],
    pip: Sequence[str | Path],
    *,
    seeds: Sequence[Path] = (),
    verify: bool = False,
) -> None:
    """Make `directory` hold every pinned file.

    `pip` is the command that runs pip; `seeds` are folders that may already hold some of the files. With
    `verify` every file is hashed again. Raises `Failure` naming a file that cannot be had as pinned.
    """
    if not verify and is_complete(directory, pins):
        return
    directory.mkdir(parents=True, exist_ok=True)
    stamp = places.read_json(directory / STAMP)
    for leftover in directory.glob(".partial-*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    with Step("checking the wheelhouse") as step:
        missing = [pin for pin in pins if not _is_good(directory, pin, stamp, verify, step)]
        missing = [pin for pin in missing if not _seed(directory, pin, seeds, step)]
    if missing:
        _Download(directory, missing, pip).run()
    places.write_json(directory / STAMP, {pin.file: _state(directory / pin.file) for pin in pins})


def _state(path: Path) -> list[int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return [stat.st_size, stat.st_mtime_ns]


def _is_good(directory: Path, pin: Pin, stamp: dict[str, object], verify: bool, step: Step) -> bool:
    path = directory / pin.file
    if not path.exists():
        return False
    step.update(pin.file)
    if not verify and stamp.get(pin.file) == _state(path):
        return True
    problem = pin.problem(path)
    if problem:
        print(f"{pin.file} {problem}: it is fetched again", flush=True)
        path.unlink()
    return problem is None


def _seed(directory: Path, pin: Pin, seeds: Sequence[Path], step: Step) -> bool:
    for seed in seeds:
        source = seed / pin.file
        step.update(pin.file)
        if source.is_file() and pin.problem(source) is None:
            place(source, directory / pin.file)
            return True
    return False


def place(source: Path, target: Path) -> None:
    """Put a checked file in place by a rename: hard-linked, or copied from another file system."""
    staging = target.with_name(f".partial-{target.name}")
    try:
        os.link(source, staging)
    except OSError:
        shutil.copy2(source, staging)
    staging.replace(target)


def batches(pins: Sequence[Pin]) -> list[list[Pin]]:
    """Large files first and alone, the small ones together: starting pip costs half a second.

    torch is the very first, because it is what a machine's pip most often cannot find.
    """
    ordered = sorted(pins, key=lambda pin: (not pin.requirement.startswith("torch=="), -pin.size_bytes))
    large = [
        [pin] for pin in ordered if pin.size_bytes > ALONE_BYTES or pin.requirement.startswith("torch==")
    ]
    small = [pin for pin in ordered if [pin] not in large]
    return large + [small[i : i + BATCH_FILES] for i in range(0, len(small), BATCH_FILES)]


class _Download:
    """Fetches files with a few pips at once, and stops them all at the first that fails."""

    def __init__(self, directory: Path, pins: Sequence[Pin], pip: Sequence[str | Path]) -> None:
        self._directory = directory
        self._pins = pins
        self._pip = [str(word) for word in pip]
        self._queue = batches(pins)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._done_bytes = 0
        self._done_files = 0

    def run(self) -> None:
        total = sum(pin.size_bytes for pin in self._pins)
        title = f"fetching {len(self._pins)} files, {megabytes(total)}"
        workers = [threading.Thread(target=self._work) for _ in range(min(WORKERS, len(self._queue)))]
        with Step(title) as step:
            try:
                for worker in workers:
                    worker.start()
                while any(worker.is_alive() for worker in workers):
                    step.update(self._progress(total))
                    time.sleep(0.1)
            finally:
                self._stop.set()
                for worker in workers:
                    worker.join()
            if self._failure:
                raise self._failure

    def _progress(self, total: int) -> str:
        arriving = 0
        for folder in self._directory.glob(".partial-*"):
            # Not rglob: pip moves files and the folder goes while this looks, which os.walk passes over.
            for parent, _, names in os.walk(folder):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        arriving += os.stat(os.path.join(parent, name)).st_size
        done = min(self._done_bytes + arriving, total)
        return f"{done * 100 // max(total, 1)} %, {megabytes(done)}, {self._done_files} files"

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if not self._queue:
                    return
                batch = self._queue.pop(0)
            try:
                self._fetch(batch)
            except BaseException as error:
                with self._lock:
                    self._failure = self._failure or error
                self._stop.set()

    def _fetch(self, batch: Sequence[Pin]) -> None:
        with tempfile.TemporaryDirectory(dir=self._directory, prefix=".partial-") as name:
            folder = Path(name)
            # pip's own temporary files count as progress too, and vanish with the folder.
            env = places.clean_environ({"TMPDIR": name})
            listing = folder / "requirements.txt"
            listing.write_text("".join(f"{pin.line}\n" for pin in batch))
            command = [
                *self._pip,
                "download",
                "--quiet",
                "--no-input",
                "--disable-pip-version-check",
                "--no-deps",
            ]
            command += [
                "--only-binary",
                ":all:",
                "--require-hashes",
                "--dest",
                name,
                "--requirement",
                str(listing),
            ]
            output = self._call(command, env)
            if output is not None:
                raise Failure(explain(batch, output))
            for pin in batch:
                if self._stop.is_set():
                    return
                if problem := pin.problem(folder / pin.file):
                    raise Failure(
                        f"{pin.file}, as pip fetched it, {problem}; run the same command again to retry"
                    )
                (folder / pin.file).replace(self._directory / pin.file)
                with self._lock:
                    self._done_bytes += pin.size_bytes
                    self._done_files += 1

    def _call(self, command: Sequence[str], env: dict[str, str]) -> list[str] | None:
        """Run pip; the lines it printed if it failed, None if it did not."""
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            while process.poll() is None:
                if self._stop.wait(0.05):
                    process.terminate()
                    process.wait()
                    return None
            output.seek(0)
            return output.readlines() if process.returncode else None


def explain(batch: Sequence[Pin], output: Sequence[str]) -> str:
    """What a failed pip means, and what to do."""
    text = "".join(output)
    said = f"pip said:\n{tail([line for line in output if not line.startswith('WARNING: Location')])}"
    named = [
        pin for pin in batch if re.search(rf"\b{re.escape(pin.requirement)}(?![\w.+])", text, re.IGNORECASE)
    ]
    files = ", ".join(pin.file for pin in named or batch)
    if "DO NOT MATCH THE HASHES" in text or "HashMismatch" in text:
        return (
            f"{files}: what pip's index offers has another SHA-256 than tools/requirements/ says. It is "
            f"damaged or was replaced; clear pip's cache (pip cache purge) and run again. {said}"
        )
    not_found = "No matching distribution" in text or "Could not find a version" in text
    if not_found and (torch := next((pin for pin in batch if pin.requirement.startswith("torch==")), None)):
        return f"{CPU_TORCH_HELP.format(file=torch.file)}\n{said}"
    return f"pip could not fetch {files}. {said}"
