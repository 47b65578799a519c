# SPDX-License-Identifier: Apache-2.0
"""The graph builder that an engine's settings ask for."""

from __future__ import annotations

from neuron_core.devices.base import Device
from neuron_core.environ import Environment
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.compilers import compiler_named
from neuron_core.graphs.configured import configured_cache
from vllm_neuron.config import NeuronConfig


def graph_builder(device: Device, settings: NeuronConfig, environment: Environment) -> GraphBuilder:
    """A builder for ``device`` with the configured compiler and the environment's compile cache."""
    cache = configured_cache(environment)
    return GraphBuilder(
        device,
        compiler_named(settings.compiler, cache.toolchain_dir),
        cache,
        jobs=environment.compile_jobs,
        require_compiled=environment.require_compiled,
        retry_failed=environment.retry_failed,
    )
