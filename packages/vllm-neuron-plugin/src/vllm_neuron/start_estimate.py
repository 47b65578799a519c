# SPDX-License-Identifier: Apache-2.0
"""The memory estimate of an engine's configuration, made in each worker before weights are read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from neuron_core.activations import activation_bytes
from neuron_core.devices.base import Device
from neuron_core.errors import ConfigError
from neuron_core.estimate import Footprint, StartEstimate
from neuron_core.protocols import StaticModel
from neuron_models import registry
from neuron_parallel import ParallelGroups, ParallelPlan
from vllm_neuron.config import bucket_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["MakeModel", "StartEstimates"]

MakeModel = Callable[[ParallelGroups], StaticModel]
"""Makes the engine's model, unfilled, for the given groups."""

MAX_DEGREE = 128
"""Largest tensor-parallel degree that is looked at when a model does not fit."""


class StartEstimates:
    """Estimates of one engine for its own tensor-parallel degree, and for others when that does not fit.

    ``make_model`` is called on the meta device; no weight file is opened.
    """

    def __init__(self, vllm_config: VllmConfig, device: Device, make_model: MakeModel) -> None:
        self._config = vllm_config
        self._device = device
        self._make_model = make_model
        self._total_bytes, self._free_bytes = _agreed(
            device.total_memory_bytes(), device.available_memory_bytes()
        )

    def own(self) -> StartEstimate:
        """The estimate for the degree this engine was started with."""
        return self.of(self._config.parallel_config.tensor_parallel_size)

    def of(self, degree: int) -> StartEstimate:
        """The estimate for ``degree`` ranks on this host.

        Raises ``ConfigError`` if it does not divide the model or the prefill buckets.
        """
        with torch.device("meta"):
            model = self._make_model(ParallelGroups.describe(ParallelPlan(degree)))
        cache = self._config.cache_config
        share = degree if self._device.ranks_share_memory else 1
        return StartEstimate(
            footprint=self._footprint(model, degree),
            total_bytes=self._total_bytes // share,
            free_bytes=self._free_bytes // share,
            utilization=cache.gpu_memory_utilization,
            max_model_len=self._config.model_config.max_model_len,
            tensor_parallel_size=degree,
            num_blocks=cache.num_gpu_blocks_override,
            requested_kv_bytes=cache.kv_cache_memory_bytes,
        )

    def _footprint(self, model: StaticModel, degree: int) -> Footprint:
        if not isinstance(model, nn.Module):
            raise ConfigError("architectures", type(model).__name__, "the model must be a torch module")
        footprint = Footprint.of(model, model.kv_layouts, self._device)
        # After the device has brought the weights into its own form, in which a step uses them.
        plan = bucket_plan(self._config, degree)
        return dataclasses.replace(footprint, activation_bytes=activation_bytes(model, plan))

    def others(self) -> Iterator[Callable[[], StartEstimate]]:
        """Makers of the estimates of the other degrees that divide model and buckets, smallest first."""
        own, config = self._config.parallel_config.tensor_parallel_size, self._config.model_config
        for degree in range(1, MAX_DEGREE + 1):
            try:
                registry.check_model(config.hf_text_config, ParallelPlan(degree))
                bucket_plan(self._config, degree)
            except ConfigError:
                continue
            if degree != own:
                yield functools.partial(self.of, degree)


def _agreed(*sizes: int) -> tuple[int, ...]:
    """The smallest of each figure over the ranks.

    Ranks then decide alike, and none begins to load, and so to take memory, before all have looked.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return sizes
    agreed = torch.tensor(sizes, dtype=torch.int64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return tuple(agreed.tolist())
