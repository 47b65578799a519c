# SPDX-License-Identifier: Apache-2.0
"""What turns a captured graph into files, and files into a callable."""

from __future__ import annotations

from pathlib import Path

from neuron_core.errors import ConfigError, unknown_name_hint
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.inductor import InductorCompiler
from neuron_core.protocols import Compiler

__all__ = ["CPU_COMPILERS", "FxCompiler", "InductorCompiler", "compiler_named"]

CPU_COMPILERS = ("inductor", "fx")
"""Names of the compilers whose artifacts run on the host."""


def compiler_named(name: str, toolchain_dir: Path, num_threads: int | None = None) -> Compiler:
    """A compiler for the CPU by name; raises ``ConfigError`` for a name it does not know.

    ``num_threads`` is what a rank has where the artifact runs, by default what this process has.
    """
    if name == "inductor":
        return InductorCompiler(toolchain_dir, num_threads)
    if name == "fx":
        return FxCompiler()
    raise ConfigError("compiler", name, f"no such compiler; {unknown_name_hint(name, CPU_COMPILERS)}")
