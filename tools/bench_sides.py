# SPDX-License-Identifier: Apache-2.0
"""The two sides of a comparison: interpreter, environment, caches, and running a measuring script in each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from devtools.console import Failure, Step

FIGURES = "FIGURES "
"""What a measuring script's line of figures begins with."""

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
DROPPED = ("VIRTUAL_ENV", "PYTHONHOME", "VLLM_TARGET_DEVICE", "VLLM_PLUGINS", "LD_PRELOAD")
"""Variables that would make a side something else than its interpreter says."""

PROBE = """
import json, vllm
from vllm.platforms import current_platform
print("FIGURES " + json.dumps({"version": vllm.__version__, "platform": type(current_platform).__name__}))
"""


@dataclass(frozen=True)
class Side:
    """One interpreter with a vLLM, and the variables it runs under."""

    name: str
    python: str
    variables: dict[str, str] = field(default_factory=dict)
    keeps_path: bool = False
    """Whether it may see this process's PYTHONPATH; the peer must not find our packages there."""

    def environ(self, caches: Path) -> dict[str, str]:
        """The environment of a run that keeps every cache under `caches`."""
        dropped = DROPPED if self.keeps_path else (*DROPPED, "PYTHONPATH")
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in dropped and not name.startswith("VLLM_NEURON_")
        }
        env["PATH"] = f"{Path(self.python).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
        places = {
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
        return {**env, **QUIET, **places, **self.variables}

    def run(self, title: str, command: list[str], caches: Path) -> str:
        """Run `command` with this side's Python; returns its output, raises `Failure` with the end of it."""
        with Step(f"{self.name}: {title}") as step:
            return step.run([self.python, *command], env=self.environ(caches), cwd=caches)

    def figures(self, title: str, command: list[str], caches: Path) -> dict[str, float]:
        """What the script of `command` measured; raises `Failure` if it printed no figures."""
        output = self.run(title, command, caches)
        lines = [line for line in output.splitlines() if line.startswith(FIGURES)]
        if not lines:
            raise Failure(f"{self.name}: {command[0]} printed no line that begins with {FIGURES.strip()}")
        found: dict[str, float] = json.loads(lines[-1].removeprefix(FIGURES))
        return found

    def probe(self, caches: Path) -> tuple[str, str]:
        """vLLM's version and the name of the platform class it chose."""
        said = self.figures("finding out its vLLM", ["-c", PROBE], caches)
        return str(said["version"]), str(said["platform"])


def ours() -> Side:
    """This interpreter with the plugin, on the CPU device."""
    return Side("ours", sys.executable, {"VLLM_NEURON_DEVICE": "cpu"}, keeps_path=True)


def interpreter(name: str, option: str, python: str, variables: dict[str, str] | None = None) -> Side:
    """A side of another interpreter; raises `Failure` naming the `option` it came from if there is none."""
    found = shutil.which(python)
    if found is None:
        raise Failure(f"{option} {python}: no such interpreter; give one such as peer/bin/python")
    # Absolute, because runs have another working directory; not resolved, because a link is what makes it a venv.
    return Side(name, str(Path(found).absolute()), variables or {})


def peer(python: str, variables: list[str]) -> Side:
    """Another interpreter with vLLM's own CPU backend and, unless `variables` say more, one GiB of KV cache.

    Raises `Failure` if there is no such interpreter, or for a variable that is not `NAME=VALUE`.
    """
    wrong = [text for text in variables if "=" not in text]
    if wrong:
        raise Failure(f"--peer-env {wrong[0]}: write NAME=VALUE, such as VLLM_CPU_NUM_OF_RESERVED_CPU=0")
    given = dict(text.split("=", 1) for text in variables)
    return interpreter("peer", "--peer", python, {"VLLM_CPU_KVCACHE_SPACE": "1", **given})


def check_peer(mine: tuple[str, str], other: tuple[str, str]) -> None:
    """Raise `Failure` unless the sides are this plugin and vLLM's CPU backend, of the same vLLM version."""
    if mine[1] != "NeuronPlatform":
        raise Failure(f"this Python's vLLM chose {mine[1]}, not this plugin; run `tools/dev.py nox -s bench`")
    if other[1] != "CpuPlatform":
        raise Failure(f"the peer's vLLM chose {other[1]}; give a Python with vLLM's CPU backend (vllm-cpu)")
    versions = [version.partition("+")[0] for version, _ in (mine, other)]
    if versions[0] != versions[1]:
        raise Failure(f"the peer has vLLM {versions[1]} and we have {versions[0]}: compare the same version")


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that spins on the last of our processors while the block runs."""
    processor = max(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", spin])
    try:
        yield
    finally:
        process.kill()
        process.wait()
