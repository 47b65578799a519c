# SPDX-License-Identifier: Apache-2.0
"""The border to the lowering: a captured folder in, ``graph.hlo.pb`` and ``hlo.json`` added."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from neuron_core.errors import CacheError, CompileError
from neuron_core.graphs.compilers import xla_lowering
from neuron_core.graphs.compilers.captured import CapturedFiles
from neuron_core.graphs.compilers.xla_lowering import EXIT_FAILED, EXIT_MISSING, HLO_FACTS_FILE, HLO_FILE

__all__ = ["HLO_FACTS_FILE", "HLO_FILE", "HloFacts", "Lowering", "LoweringError", "XlaLowering"]

CHECK_TIMEOUT_S = 120.0


class Lowering(Protocol):
    """Turns a captured graph into HLO."""

    def version(self) -> str:
        """Everything that changes the HLO besides the graph, "absent" when nothing is installed; no import."""
        ...

    def missing(self) -> str:
        """Why it cannot be used here, "" when it can."""
        ...

    def lower(self, folder: Path) -> None:
        """Add ``graph.hlo.pb`` and ``hlo.json`` to a captured folder; raises ``CompileError`` when it cannot."""
        ...


@dataclass(frozen=True)
class HloFacts:
    """How the HLO relates to the graph.

    ``parameters[p]`` is the index in ``[*weights, *inputs]`` of parameter ``p``, -1 for one whose value is that of
    ``constants[p]``; an input the program does not read has none. ``aliases`` pairs an output with the parameter whose
    new value it is.
    """

    parameters: tuple[int, ...]
    num_outputs: int
    aliases: tuple[tuple[int, int], ...]
    constants: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> HloFacts:
        """Read ``hlo.json``; raises ``CacheError`` when it is missing or malformed."""
        path = folder / HLO_FACTS_FILE
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            aliases = tuple((int(output), int(parameter)) for output, parameter in data["aliases"])
            constants = {
                int(number): torch.tensor(fact["value"], dtype=getattr(torch, fact["dtype"]))
                for number, fact in data["constants"].items()
            }
            return cls(tuple(map(int, data["parameters"])), int(data["num_outputs"]), aliases, constants)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheError(f"{path} does not describe an HLO program: {error}") from error


class LoweringError(CompileError):
    """The lowering failed; ``recordable`` is False where it was killed, timed out or crashed."""

    def __init__(self, message: str, recordable: bool = True) -> None:
        super().__init__(message)
        self.recordable = recordable


class XlaLowering:
    """Lowers with torch_xla on the CPU, each graph in a process of its own, ended after ``timeout_s`` seconds."""

    def __init__(self, timeout_s: float = 1800.0) -> None:
        self.timeout_s = timeout_s

    def version(self) -> str:
        """Installed torch_xla, and the source of the lowering and of the ops' static forms."""
        try:
            installed = importlib.metadata.version("torch_xla")
        except importlib.metadata.PackageNotFoundError:
            return "absent"
        return f"torch_xla {installed} {_source_digest()}"

    def missing(self) -> str:
        """Import torch_xla in a child process, once per process: metadata alone may be a placeholder's."""
        return _missing()

    def lower(self, folder: Path) -> None:
        """Run ``xla_lowering`` on ``folder``."""
        status, said = _child([str(folder)], self.timeout_s)
        if status != 0:
            raise LoweringError(f"{_label(folder)} cannot be lowered to HLO: {said}", status == EXIT_FAILED)
        if not (folder / HLO_FILE).is_file():
            raise LoweringError(f"{_label(folder)}: the lowering ended without {HLO_FILE}: {said}", False)


def _label(folder: Path) -> str:
    return CapturedFiles.read(folder).label


@functools.cache
def _missing() -> str:
    status, said = _child([], CHECK_TIMEOUT_S)
    if status == 0:
        return ""
    if status == EXIT_MISSING:
        return f"no lowering to HLO ({said})"
    return f"torch_xla does not start (exit status {status}: {said})"


@functools.cache
def _source_digest() -> str:
    from neuron_core.graphs.key import files_digest

    folder = Path(xla_lowering.__file__).parent
    return files_digest([folder / "xla_lowering.py", folder / "static_ops.py"])[:12]


def _child(arguments: list[str], timeout_s: float) -> tuple[int, str]:
    """Exit status and last line of the lowering program; the status is -1 when it was ended for its time."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
        "from neuron_core.graphs.compilers.xla_lowering import main; sys.exit(main(sys.argv[2:]))"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return -1, f"it did not end within {timeout_s:.0f} s"
    lines = (done.stdout if done.stdout.strip() else done.stderr).strip().splitlines()
    if done.returncode in (-9, 137):
        return done.returncode, "the process was killed, most likely because host memory (RAM) ran out"
    return done.returncode, lines[-1] if lines else f"exit status {done.returncode} without a message"
