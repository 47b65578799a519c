# SPDX-License-Identifier: Apache-2.0
"""vLLM settings this plugin decides: its own compilation off, our worker and scheduler in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs
from vllm.logger import init_logger

from neuron_core.environ import export
from neuron_core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["SCHEDULER", "WORKER", "install_classes", "limit_payloads", "turn_off_compilation"]

logger = init_logger(f"vllm.{__name__}")

WORKER = "vllm_neuron.worker.NeuronWorker"
SCHEDULER = "vllm_neuron.scheduler.NeuronScheduler"

PAYLOAD_LIMIT = "VLLM_MAX_EMBED_DECODE_BYTES"
WIDEST_FLOAT_BYTES = 8


def turn_off_compilation(vllm_config: VllmConfig) -> None:
    """No ``torch.compile`` and no CUDA graphs by vLLM: graphs are captured and compiled by ``neuron_core``.

    Runs before vLLM fills in defaults, so a value already there is the user's: raises ``ConfigError`` unless
    it is off.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    ours = 'vLLM compiles nothing here; leave it out; {"neuron_config": {"compiler": …}} chooses our compiler'
    compilation = vllm_config.compilation_config
    if compilation.mode not in (None, CompilationMode.NONE):
        raise ConfigError("--compilation-config.mode", compilation.mode.name, ours)
    if compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE):
        raise ConfigError("--compilation-config.cudagraph_mode", compilation.cudagraph_mode.name, ours)
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    model_config = vllm_config.model_config
    if model_config is not None and model_config.enforce_eager:
        logger.warning_once(
            "--enforce-eager has no effect: graphs are always compiled ahead of time; "
            'to interpret them instead, set {"neuron_config": {"compiler": "fx"}}'
        )


def install_classes(vllm_config: VllmConfig) -> None:
    """Set ``worker_cls`` and ``scheduler_cls``; raises ``ConfigError`` if the user asked for others."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.worker_cls not in ("auto", WORKER):
        raise ConfigError(
            "--worker-cls", parallel.worker_cls, f"not supported; leave it out, {WORKER} is used"
        )
    parallel.worker_cls = WORKER
    chosen = scheduler.scheduler_cls
    if chosen not in (None, SCHEDULER) and not _is_our_scheduler(chosen):
        raise ConfigError("--scheduler-cls", chosen, f"must be a subclass of {SCHEDULER}, or left out")
    if chosen is None:
        scheduler.scheduler_cls = SCHEDULER


def limit_payloads(vllm_config: VllmConfig) -> None:
    """Let no payload with prompt embeddings unpack to more than the longest prompt has, in the widest float.

    Unless the user set ``VLLM_MAX_EMBED_DECODE_BYTES``, vLLM allows 2 GiB for each, whatever the model.
    """
    model = vllm_config.model_config
    if model.enable_prompt_embeds and not envs.is_set(PAYLOAD_LIMIT):
        most = model.max_model_len * model.get_hidden_size() * WIDEST_FLOAT_BYTES
        export({PAYLOAD_LIMIT: str(min(most, envs.VLLM_MAX_EMBED_DECODE_BYTES))})


def _is_our_scheduler(chosen: object) -> bool:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_neuron.scheduler import NeuronScheduler

    cls = resolve_obj_by_qualname(chosen) if isinstance(chosen, str) else chosen
    return isinstance(cls, type) and issubclass(cls, NeuronScheduler)
