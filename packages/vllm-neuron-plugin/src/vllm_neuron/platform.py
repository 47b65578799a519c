# SPDX-License-Identifier: Apache-2.0
"""The platform: what vLLM asks about the device, and where this plugin settles the engine's configuration."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from neuron_core.devices.discovery import Discovery, discover
from neuron_core.environ import KNOWN_NAMES, Environment, unknown_names
from neuron_core.errors import ConfigError
from vllm_neuron import checks, defaults
from vllm_neuron.config import bucket_plan, neuron_config
from vllm_neuron.engine_record import require_engine
from vllm_neuron.models import check_architectures
from vllm_neuron.patches import MODEL_RUNNER_VARIABLE, apply_patches, quiet_accelerator_cache
from vllm_neuron.pooling.settings import check_pooling
from vllm_neuron.versions import check_vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["NeuronPlatform", "discovered"]

logger = init_logger(f"vllm.{__name__}")

# vLLM's shutdown must find these quiet in every process that has this platform, worker or not.
quiet_accelerator_cache()

GIB = 1 << 30
ORDINARY_MEMORY_BYTES = 64 * GIB
"""From 70 GiB on, vLLM takes the device for a large accelerator and triples its default batch sizes."""


@functools.cache
def discovered() -> Discovery:
    """The device of this process and why it was chosen."""
    return discover(Environment.read())


class NeuronPlatform(Platform):
    """One platform for the Neuron and the CPU device; it asks the device, never which one it is."""

    _enum = PlatformEnum.OOT
    # vLLM builds torch devices from both names, so they are torch's.
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    ray_device_key = ""
    device_control_env_var = "NEURON_VISIBLE_DEVICES"
    simple_compile_backend = "eager"
    dist_backend = "gloo"

    def __init__(self) -> None:
        super().__init__()
        kind = discovered().device.torch_device.type
        self.device_name = kind
        self.device_type = kind

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """The first is what vLLM's ``auto`` gives a float32 or float16 checkpoint."""
        return list(checks.SUPPORTED_DTYPES)

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """The first hook of a start: refuses another vLLM, patches the process, names the device."""
        check_vllm_version(vllm.__version__)
        _check_model_runner()
        apply_patches()
        found = discovered()
        logger.info_once(found.reason)
        for remark in (*found.remarks, *unknown_names().values()):
            logger.warning_once(remark)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Turn off vLLM's own compilation before its defaults are derived from it."""
        defaults.turn_off_compilation(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what cannot be honoured, install worker and scheduler; runs again in the engine process."""
        check_vllm_version(vllm.__version__)
        _check_model_runner()
        settings = neuron_config(vllm_config)
        checks.check_settings(vllm_config)
        check_pooling(vllm_config)
        defaults.install_classes(vllm_config)
        if vllm_config.parallel_config.world_size > 1:
            Environment.read().check_multiprocess()
        if vllm_config.model_config is not None:
            checks.check_model(vllm_config)
            defaults.limit_payloads(vllm_config)
            plan = bucket_plan(vllm_config)
            logger.info_once("%s; buckets: %s", settings, " ".join(bucket.name for bucket in plan.all()))
            _check_compiled(vllm_config)

    @classmethod
    def default_async_scheduling(cls) -> bool | None:
        """False where host and device are the same processors: nothing to overlap; else vLLM's default."""
        return None if discovered().device.overlaps_host else False

    @classmethod
    def verify_model_arch(cls, model_arch: str) -> None:
        """Raise ``ConfigError`` for an architecture ``neuron_models`` does not have."""
        check_architectures([model_arch])

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Raise ``VLLMValidationError`` (HTTP 400) for a request this engine cannot answer as asked."""
        # vLLM's parameter classes import its configuration, which imports the platform.
        from vllm_neuron.admission import validate_request

        validate_request(params, has_embeds=processed_inputs.get("type") == "embeds")

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """As vLLM's check, knowing our variables; an unknown one of ours is named with its nearest."""
        import os

        unknown = [
            name for name in os.environ if name.startswith("VLLM_") and name not in envs.environment_variables
        ]
        for name in unknown:
            if name in KNOWN_NAMES:
                continue
            message = unknown_names().get(name, f"Unknown vLLM environment variable detected: {name}")
            if hard_fail:
                raise ConfigError(name, os.environ[name], message)
            logger.warning_once(message)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The class path of ``NeuronAttentionBackend``, whatever is selected."""
        return "vllm_neuron.attention.NeuronAttentionBackend"

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Nothing to do: the block size was checked with the other settings; no vLLM layer exists to ask."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The chip's name, or ``cpu``."""
        device = discovered().device
        return device.chip.name if device.chip is not None else device.name

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """The device's name and number; devices have no other identity."""
        return f"{cls.get_device_name(device_id)}-{device_id}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes vLLM bases default batch sizes on; capped on a host, where size says nothing of speed."""
        device = discovered().device
        total = device.total_memory_bytes()
        return total if device.chip is not None else min(total, ORDINARY_MEMORY_BYTES)

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Bytes in use on the device."""
        ours = discovered().device
        return float(ours.total_memory_bytes() - ours.available_memory_bytes())

    @classmethod
    def set_device(cls, device: Any) -> None:
        """Nothing to do: a worker claims its device itself. vLLM's threads call this and die if it raises."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Nothing to do: every random number comes from a request's own generator."""

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing to do: vLLM's kernels are not used and not installed."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Nothing to do: vLLM's kernels are not used and not installed."""

    @classmethod
    def inference_mode(cls) -> Any:
        """``torch.no_grad``: tensors made under inference mode could not be updated in place by a graph."""
        return torch.no_grad()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """False: pinning needs an accelerator that torch knows, and fails without one."""
        return False

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """False: CUDA graphs are meant, not ours."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """False: every layer of a supported model keeps the whole context."""
        return False

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        """Empty: vLLM would bind the calling thread by it, and threads are bound by the worker."""
        return []


def _check_compiled(vllm_config: VllmConfig) -> None:
    """Refuse an engine whose graphs are known to be missing; compile and end where that was asked for."""
    environment = Environment.read()
    if environment.cpu_compile:
        from vllm_neuron.compile_command import compile_from_environment

        raise SystemExit(compile_from_environment(vllm_config))
    if environment.require_compiled:
        require_engine(vllm_config, environment.cache_dir)


def _check_model_runner() -> None:
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        hint = "this plugin's runner speaks the V1 format; unset it or use 0"
        raise ConfigError(MODEL_RUNNER_VARIABLE, "1", hint)
