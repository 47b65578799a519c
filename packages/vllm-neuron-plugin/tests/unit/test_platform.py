# SPDX-License-Identifier: Apache-2.0
"""The platform answers what vLLM asks of a device without vLLM's kernels, and its traps stay shut."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from vllm import platforms
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from neuron_core.errors import ConfigError
from vllm_neuron import checks
from vllm_neuron.attention import NeuronAttentionBackend
from vllm_neuron.platform import NeuronPlatform, discovered
from vllm_neuron.versions import check_vllm_version, version_problem


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VLLM_TARGET_DEVICE", "VLLM_PLUGINS")
    }
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment | variables
    )


def test_vllm_chooses_the_plugin():
    assert isinstance(current_platform, NeuronPlatform)
    assert current_platform._enum is PlatformEnum.OOT
    assert not current_platform.is_cpu()


def test_device_names_are_torch_devices():
    # vLLM makes torch.device(f"{device_name}:{index}") of groups and DeviceConfig(device_type) of engines.
    assert torch.device(f"{current_platform.device_name}:0").type == discovered().device.torch_device.type
    assert torch.device(current_platform.device_type)


def test_one_line_says_why_the_device_was_chosen():
    reason = discovered().reason
    assert "\n" not in reason and reason.startswith(("CPU device: ", "Neuron device: "))


@pytest.mark.parametrize(
    "call",
    [
        lambda: current_platform.set_device(torch.device("cpu")),
        lambda: current_platform.set_device(0),
        lambda: current_platform.manual_seed_all(1),
        lambda: current_platform.import_kernels(),
        lambda: current_platform.import_ir_kernels(),
        lambda: current_platform.update_block_size_for_backend(None),
        lambda: torch.accelerator.empty_cache(),
        lambda: torch.accelerator.empty_host_cache(),
    ],
)
def test_calls_that_must_do_nothing_do_nothing(call):
    assert call() is None


def test_answers():
    assert current_platform.simple_compile_backend == "eager"
    assert current_platform.is_pin_memory_available() is False
    assert current_platform.support_static_graph_mode() is False
    assert current_platform.supported_dtypes == [torch.bfloat16, torch.float32]
    assert current_platform.discover_numa_topology() == []
    assert 0 < current_platform.get_device_total_memory() <= 64 << 30
    assert current_platform.get_current_memory_usage() > 0
    assert current_platform.get_device_name() and current_platform.get_device_uuid(1)
    with current_platform.inference_mode():
        assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_big_host_does_not_get_the_batch_defaults_of_a_big_accelerator(monkeypatch):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    monkeypatch.setattr(type(discovered().device), "total_memory_bytes", lambda self: 1 << 41)
    tokens, seqs = EngineArgs.get_batch_defaults(1)
    assert tokens[UsageContext.LLM_CLASS] == 8192 and tokens[UsageContext.OPENAI_API_SERVER] == 2048
    assert set(seqs.values()) == {256}


def test_attention_backend_is_real_and_takes_the_block_sizes_we_take():
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backend import AttentionBackend

    found = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(None, None))
    assert found is NeuronAttentionBackend and issubclass(found, AttentionBackend)
    sizes = (8, 16, 24, 32, 48, 128)
    assert [size for size in sizes if found.supports_block_size(size)] == [16, 32, 48, 128]
    assert all(size % checks.BLOCK_SIZE_MULTIPLE == 0 for size in (16, 32, 48, 128))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+empty", "0.32.3.dev1"])
def test_the_supported_series_passes(version):
    assert version_problem(version) is None
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.3.2", "1.32.0", "dev"])
def test_another_vllm_is_refused_with_both_versions(version):
    with pytest.raises(ConfigError) as caught:
        check_vllm_version(version)
    assert repr(version) in str(caught.value) and "0.32.0" in str(caught.value)


def test_another_vllm_is_explained_when_the_engine_is_configured(tiny_llama):
    start = f"vllm.EngineArgs(model={str(tiny_llama)!r}).create_engine_config()"
    code = f"import vllm; vllm.__version__ = '0.33.0'; {start}"
    done = python(code)
    assert done.returncode != 0
    assert (
        "vllm.__version__='0.33.0': this plugin overrides internal interfaces of vLLM 0.32.x" in done.stderr
    )


def test_forcing_an_absent_device_names_what_is_missing():
    if discovered().device.name == "neuron":
        pytest.skip("a Neuron device is present")
    done = python(
        "from vllm.platforms import current_platform as p; p.device_type", VLLM_NEURON_DEVICE="neuron"
    )
    assert done.returncode != 0
    assert "VLLM_NEURON_DEVICE='neuron': no Neuron device node" in done.stderr


def test_cpu_target_trap_is_named():
    # vLLM then never asks a plugin for its platform; with no CPU build installed it fails on its own.
    code = (
        "import vllm.platforms as p\n"
        "p.cpu_platform_plugin = lambda: 'vllm.platforms.cpu.CpuPlatform'\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()"
    )
    done = python(code, VLLM_TARGET_DEVICE="cpu")
    assert "VLLM_TARGET_DEVICE=cpu makes vLLM take its own CPU backend; unset it" in done.stderr + done.stdout


def test_unknown_variables_are_named_and_ours_are_not(monkeypatch, caplog):
    from vllm import logger as vllm_logger  # noqa: F401 - configures the logger that is captured

    monkeypatch.setenv("VLLM_NEURON_CACHE_DIR", "/tmp/x")
    current_platform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_NEURON_CACHE_DUR", "/tmp/x")
    with pytest.raises(ConfigError, match="VLLM_NEURON_CACHE_DIR"):
        current_platform.validate_environ(hard_fail=True)
    current_platform.validate_environ(hard_fail=False)
    monkeypatch.delenv("VLLM_NEURON_CACHE_DUR")
    monkeypatch.setenv("VLLM_NO_SUCH", "1")
    with pytest.raises(ConfigError, match="VLLM_NO_SUCH"):
        current_platform.validate_environ(hard_fail=True)


def test_model_runner_is_pinned_before_vllm_asks():
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_platform_is_registered_once():
    names = [
        point.name
        for point in __import__("importlib.metadata").metadata.entry_points(group="vllm.platform_plugins")
    ]
    assert names.count("neuron") == 1
    assert platforms.resolve_current_platform_cls_qualname() == "vllm_neuron.platform.NeuronPlatform"
