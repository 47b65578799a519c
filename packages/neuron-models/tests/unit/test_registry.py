# SPDX-License-Identifier: Apache-2.0
"""Architectures are found by name, and what cannot be honoured is refused by name before weights exist."""

import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig

from neuron_core.errors import ConfigError
from neuron_core.graphs.buckets import Bucket, Phase
from neuron_core.protocols import StaticModel
from neuron_models import build_model, check_model, register, registry, resolve, supported_architectures
from neuron_parallel import ParallelGroups, ParallelPlan

ONE = ParallelPlan()


@pytest.fixture(autouse=True)
def restore_registry(monkeypatch):
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


def refusal(config, plan=ONE):
    with pytest.raises(ConfigError) as caught:
        check_model(config, plan)
    return str(caught.value)


def test_an_unknown_architecture_lists_those_supported(driver):
    config = driver.llama_config()
    config.architectures = ["MambaForCausalLM"]
    message = refusal(config)
    assert "architectures=['MambaForCausalLM']" in message
    assert all(name in message for name in supported_architectures())


def test_an_import_that_fails_is_told(driver):
    register("LlamaForCausalLM", "no_such_package.models:Llama")
    with pytest.raises(ConfigError, match=r"No module named 'no_such_package'.*Qwen3ForCausalLM") as caught:
        resolve(driver.llama_config())
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_malformed_target_is_refused():
    with pytest.raises(ConfigError, match="must look like"):
        register("X", "package.module")


def test_another_packages_model_can_be_registered(driver):
    from neuron_models.llama import LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        pass

    register("MineForCausalLM", Mine)
    config = driver.llama_config()
    config.architectures = ["MineForCausalLM"]
    groups = ParallelGroups.single()
    model = build_model(config, dtype=torch.float32, groups=groups, block_size=8)
    assert type(model) is Mine
    assert isinstance(model, StaticModel)


def test_importing_the_package_imports_no_model():
    code = "import sys, neuron_models; print([m for m in sys.modules if m.startswith('neuron_models.llama')])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu': is not implemented for llama; use 'silu'"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ("llama", {"sliding_window": 128}, "sliding_window=128"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type='dynamic': is not implemented; use one of default, linear, llama3, yarn",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "use_sliding_window",
        ),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types="),
    ],
)
def test_a_field_that_is_not_implemented_is_refused_by_name(driver, family, changes, words):
    assert words in refusal(getattr(driver, f"{family}_config")(**changes))


def test_a_field_transformers_declares_and_no_rule_names_is_refused(driver):
    class GatedConfig(LlamaConfig):
        attention_gate: bool = False

    sizes = driver.LLAMA_SIZES | {"architectures": ["LlamaForCausalLM"]}
    check_model(GatedConfig(**sizes), ONE)
    assert "attention_gate=True: is not implemented for llama; use False" in refusal(
        GatedConfig(**sizes, attention_gate=True)
    )


def test_a_field_nobody_knows_is_reported(driver, caplog):
    check_model(driver.llama_config(is_llama_config=True), ONE)
    assert "is_llama_config" in caplog.text


def test_a_degree_that_does_not_divide_is_refused(driver):
    message = refusal(driver.llama_config(), ParallelPlan(tensor_parallel_size=3))
    assert message.startswith("tensor_parallel_size=3: does not divide 4 attention heads")
    assert message.endswith("use 1, 2 or 4")


@pytest.mark.parametrize(
    ("phase", "variant"), [(Phase.PREFILL, "logits"), (Phase.LOGITS, "greedy"), (Phase.DECODE, "x")]
)
def test_an_unknown_variant_is_refused(driver, phase, variant):
    model = build_model(
        driver.llama_config(), dtype=torch.float32, groups=ParallelGroups.single(), block_size=8
    )
    with pytest.raises(ConfigError, match="variant"):
        model.program(Bucket(phase, 8, 8, 64), variant)
