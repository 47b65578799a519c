# SPDX-License-Identifier: Apache-2.0
"""The ``neuronx`` compiler: captured graph, HLO, then AWS's ``neuronx-cc``. **Never run with the real compiler.**

Written against AWS's public documents; the lowering is tested with the real torch_xla, the compiler with a stand-in
executable that prints what the documents and users' reports show.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from neuron_core.devices.chips import ChipSpec, chip_for_target
from neuron_core.environ import Environment
from neuron_core.errors import CacheError, CompileError, ConfigError
from neuron_core.graphs.capture import CapturedGraph
from neuron_core.graphs.compilers.captured import INPUTS_FILE, write_captured
from neuron_core.graphs.compilers.fx import GRAPH_FILE
from neuron_core.graphs.compilers.hlo import HLO_FILE, Lowering, XlaLowering
from neuron_core.graphs.compilers.neff import NeffHeader
from neuron_core.graphs.compilers.neff_loader import load_neff
from neuron_core.graphs.compilers.vendor_errors import CompilerRun, compilers_running
from neuron_core.graphs.compilers.vendor_flags import OPTIONS, checked_flags, command_line
from neuron_core.graphs.compilers.vendor_tool import VendorTool
from neuron_core.graphs.compilers.vendor_wheels import VendorToolsMissing
from neuron_core.protocols import GraphCall

__all__ = ["LOG_FILE", "NEFF_FACTS_FILE", "NEFF_FILE", "NeuronxCompiler", "write_captured"]

NEFF_FILE = "graph.neff"
NEFF_FACTS_FILE = "neff.json"
LOG_FILE = "neuronx-cc.log"

_WORK = "work"
_VENDOR_LOG = "log-neuron-cc.txt"
_FORM = 1
"""Raised when entries are laid out differently."""


class NeuronxCompiler:
    """Compiles for a Neuron chip; needs no device.

    ``target`` is a name ``neuronx-cc --target`` takes. ``lnc``, the physical cores of a logical one, defaults to
    ``NEURON_LOGICAL_NC_CONFIG``, else the chip's default. ``flags`` are further options of the compiler, see
    ``vendor_flags``. ``executable`` is a name on PATH or a path. A compile that takes longer than ``timeout_s``
    seconds is ended. What a failed compile leaves, the captured graph at least, is kept below ``keep_dir``.

    Raises ``ConfigError`` for an unknown target, an ``lnc`` that the chip does not have or that contradicts the
    environment, and a flag that does not fit.
    """

    name = "neuronx"
    shape_free_inputs = False

    def __init__(
        self,
        target: str,
        *,
        lnc: int | None = None,
        flags: Mapping[str, object] | None = None,
        executable: str | None = None,
        lowering: Lowering | None = None,
        keep_dir: Path | None = None,
        timeout_s: float = 7200.0,
        environment: Environment | None = None,
    ) -> None:
        chip = chip_for_target(target, "target")
        wanted = (environment or Environment.read()).logical_nc_config
        self.lnc = _checked_lnc(chip, lnc, wanted)
        self._target = target
        self._chip = chip
        self._flags = checked_flags(flags, target, chip, self.lnc)
        self._executable = executable or "neuronx-cc"
        self._lowering = lowering or XlaLowering()
        self._keep_dir = keep_dir
        self._timeout_s = timeout_s

    def version(self) -> str:
        """Versions of compiler and lowering; "absent" without a compiler, and then nothing can be compiled."""
        version = self._tool.version
        return f"neuronx-cc {version}; {self._lowering.version()}; form {_FORM}" if version else "absent"

    def flags(self) -> Mapping[str, str]:
        """The options passed that change the artifact; a switch has the value ""."""
        return {name: value for name, value in self._flags.items() if OPTIONS[name].in_artifact}

    def target(self) -> str:
        """What a NEFF is bound to."""
        return f"{self._target} lnc={self.lnc}"

    def describe(self) -> dict[str, Any]:
        """Chip, target, LNC and the versions of the tools."""
        return {
            "chip": self._chip.name,
            "target": self._target,
            "lnc": self.lnc,
            "neuronx_cc": self._tool.version or "absent",
            "lowering": self._lowering.version(),
        }

    def check_tools(self) -> None:
        """Raise ``VendorToolsMissing`` with the wheels to install when nothing can be compiled here."""
        self._refuse_missing("this model", None)

    def compile(self, graph: CapturedGraph, staging: Path) -> None:
        """Write the captured graph, its HLO, ``graph.neff``, ``neff.json`` and the compiler's log.

        Raises ``VendorToolsMissing`` when lowering or compiler are not installed, ``VendorCompileError`` when the
        compiler fails, ``CompileError`` when the graph cannot be lowered.
        """
        write_captured(graph, staging)
        kept = self._kept(graph, staging)
        try:
            self._refuse_missing(graph.label, kept)
            self._lowering.lower(staging)
            self._run(graph.label, staging, kept)
        except CompileError:
            if kept is not None:
                shutil.copytree(staging, kept, dirs_exist_ok=True)
            raise

    def load(self, entry: Path, groups: Sequence[str] = ()) -> GraphCall:
        """Load the NEFF through AWS's ``nrtpy``, which moves all tensors at each call. Not run on hardware.

        Raises ``CacheError`` for a NEFF that is damaged or made for another LNC, ``DeviceError`` without a runtime.
        """
        header = NeffHeader.read(entry / NEFF_FILE)
        if header.lnc not in (0, self.lnc):
            raise CacheError(f"{entry / NEFF_FILE} is for lnc {header.lnc}, this process uses {self.lnc}")
        return load_neff(entry / NEFF_FILE, entry)

    @functools.cached_property
    def _tool(self) -> VendorTool:
        return VendorTool.find(self._executable)

    def _refuse_missing(self, label: str, kept: Path | None) -> None:
        reasons = [reason for reason in (self._tool.missing, self._lowering.missing()) if reason]
        if reasons:
            raise VendorToolsMissing.of(label, reasons, torch.__version__, kept)

    def _kept(self, graph: CapturedGraph, staging: Path) -> Path | None:
        """Where a failed compile of this graph is kept; graphs that differ have different folders."""
        if self._keep_dir is None:
            return None
        content = hashlib.sha256()
        for file in (GRAPH_FILE, INPUTS_FILE):
            content.update((staging / file).read_bytes())
        name = re.sub(r"[^\w.-]+", "-", "-".join(filter(None, (graph.bucket, graph.name))))
        return self._keep_dir / f"{name}-{content.hexdigest()[:8]}"

    def _run(self, label: str, staging: Path, kept: Path | None) -> None:
        work = staging / _WORK
        work.mkdir()
        start = time.perf_counter()
        arguments = ["compile", str(staging / HLO_FILE), *command_line(self._flags)]
        arguments += [f"--output={staging / NEFF_FILE}", f"--logfile={work / _VENDOR_LOG}"]
        returncode = self._tool.run(arguments, work, staging / LOG_FILE, self._timeout_s)
        seconds = time.perf_counter() - start
        header, fault = self._header(staging / NEFF_FILE)
        if returncode != 0 or header is None:
            run = CompilerRun(
                label=label,
                returncode=returncode,
                output=_collect_log(staging, work),
                log_path=None if kept is None else kept / LOG_FILE,
                versions=f"neuronx-cc {self._tool.version}, {self._lowering.version()}, torch {torch.__version__}",
                timeout_s=self._timeout_s,
                others=compilers_running(Path(self._tool.path).name),
                fault=fault,
            )
            shutil.rmtree(work)
            raise run.error()
        shutil.rmtree(work)
        facts = {**self.describe(), "flags": dict(self._flags), "header": asdict(header), "seconds": seconds}
        (staging / NEFF_FACTS_FILE).write_text(json.dumps(facts, indent=1))

    def _header(self, neff: Path) -> tuple[NeffHeader | None, str]:
        """The header of what was compiled, or what is wrong with it."""
        if not neff.is_file():
            return None, "it reported success and wrote no NEFF"
        try:
            header = NeffHeader.read(neff)
        except CacheError as error:
            return None, f"it reported success, but {error}"
        if header.lnc not in (0, self.lnc):
            return None, f"it reported success, but the NEFF is for lnc {header.lnc} instead of {self.lnc}"
        return header, ""


def _checked_lnc(chip: ChipSpec, lnc: int | None, environment: int | None) -> int:
    if environment is not None:
        chip.logical_cores_at(environment)
    if lnc is None:
        return environment if environment is not None else chip.default_lnc
    if lnc not in chip.lnc_values:
        raise ConfigError("lnc", lnc, f"{chip.name} takes {' or '.join(map(str, chip.lnc_values))}")
    if environment is not None and lnc != environment:
        raise ConfigError(
            "lnc",
            lnc,
            f"contradicts NEURON_LOGICAL_NC_CONFIG={environment}, which the runtime obeys; give both the same "
            "value or unset the variable",
        )
    return lnc


def _collect_log(staging: Path, work: Path) -> str:
    """What the compiler printed and what it wrote to its own log file, as one log."""
    log = staging / LOG_FILE
    own = work / _VENDOR_LOG
    if own.is_file():
        with log.open("ab") as output:
            output.write(b"\n" + own.read_bytes())
    return log.read_text(errors="replace").strip()
