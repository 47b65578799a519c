# SPDX-License-Identifier: Apache-2.0
"""From what ``--model`` and ``--load-format`` name to a model's parameters."""

from __future__ import annotations

import os

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

from neuron_core.errors import ConfigError
from neuron_models import load_weights
from neuron_models.kv_scales import load_kv_scales
from neuron_parallel import ParallelGroup
from vllm_neuron.config import neuron_config
from vllm_neuron.load_progress import LoadProgress

FORMATS = ("auto", "safetensors", "hf", "dummy")
DUMMY_SCALE = 0.02


def fill_weights(
    model: nn.Module, vllm_config: VllmConfig, group: ParallelGroup, *, dummy: bool, shown: bool
) -> str:
    """Fill ``model`` from its checkpoint, or with small random numbers under ``--load-format dummy``.

    Returns what was read, in words for the log. ``shown`` lets a long load show its progress, unless vLLM's
    ``--no-use-tqdm-on-load`` is given.
    """
    load = vllm_config.load_config
    load_format = str(load.load_format)
    if load_format not in FORMATS:
        raise ConfigError("load_format", load_format, f"is not supported; use one of {', '.join(FORMATS)}")
    if dummy or load_format == "dummy":
        _fill_at_random(model, vllm_config.model_config.seed or 0)
        return "random numbers, no file was read"
    source = vllm_config.model_config.model
    folder = source
    if not os.path.isdir(source):
        folder = download_weights_from_hf(
            source, load.download_dir, ["*.safetensors"], vllm_config.model_config.revision
        )
    with LoadProgress(shown=shown and load.use_tqdm_on_load) as progress:
        stats = load_weights(model, folder, group, group.rank(), progress=progress)
    load_kv_scales(model, folder, group, group.rank(), neuron_config(vllm_config).kv_scales)
    return f"{stats.num_tensors} parameters read in {stats.seconds:.2f} s ({stats.gb_per_s:.2f} GB/s)"


@torch.no_grad()
def _fill_at_random(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, DUMMY_SCALE, generator=generator)
        else:
            parameter.fill_(1.0)
