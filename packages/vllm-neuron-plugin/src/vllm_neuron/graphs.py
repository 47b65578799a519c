# SPDX-License-Identifier: Apache-2.0
"""The graph builder that an engine's settings ask for."""

from __future__ import annotations

from neuron_core.devices.base import Device
from neuron_core.environ import Environment
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.compilers.inductor import InductorCompiler
from neuron_core.protocols import Compiler
from vllm_neuron.config import NeuronConfig


def graph_builder(device: Device, settings: NeuronConfig, environment: Environment) -> GraphBuilder:
    """A builder for ``device`` with the configured compiler and the compile cache of ``VLLM_NEURON_CACHE_DIR``."""
    cache = CompileCache(environment.cache_dir)
    compiler: Compiler = FxCompiler() if settings.compiler == "fx" else InductorCompiler(cache.toolchain_dir)
    return GraphBuilder(device, compiler, cache, require_compiled=environment.require_compiled)
